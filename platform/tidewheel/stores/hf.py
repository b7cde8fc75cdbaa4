"""hf://datasets/owner/name: data sets of the Hugging Face hub, to read from."""

from __future__ import annotations

from tidewheel.hub import HubStore
from tidewheel.storage import Store
from tidewheel.stores import Storage


class HuggingFace(Storage):
    """Data sets of the Hugging Face hub, see `tidewheel.hub`."""

    def open(self, uri: str) -> Store:
        return HubStore(uri)
