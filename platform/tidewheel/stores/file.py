"""file:///path: a folder of this machine, as a plain path is."""

from __future__ import annotations

from urllib.parse import unquote

from tidewheel.errors import StorageError
from tidewheel.storage import LocalStore, Store
from tidewheel.stores import Storage


class File(Storage):
    """Local folders as URIs."""

    def open(self, uri: str) -> Store:
        host, _, path = uri.partition("://")[2].partition("/")
        if host not in ("", "localhost"):
            raise StorageError(f"{host!r} is in place of a host", where=uri, fix="write file:///absolute/path")
        return LocalStore("/" + unquote(path))
