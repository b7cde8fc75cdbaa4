"""hf://datasets/owner/name, hf://owner/name: data sets and models of the Hugging Face hub, to read from."""

from __future__ import annotations

from typing import ClassVar

from tidewheel.storage import Store
from tidewheel.stores import Storage
from tidewheel.stores.hub.store import HubStore
from tidewheel.stores.hub.uri import HubUri, parse


class HuggingFace(Storage):
    """Data sets and models of the Hugging Face hub, see `tidewheel.stores.hub`."""

    EXAMPLE: ClassVar[str] = "hf://datasets/owner/name"

    def open(self, uri: str) -> Store:
        return HubStore(uri)

    def versioned(self, uri: str) -> HubUri:
        return parse(uri)
