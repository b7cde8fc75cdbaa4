"""A folder that is read as an object store is, by ranges, and counts what is read of it."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any, BinaryIO

from tidewheel.storage import LocalStore


class CountingStore(LocalStore):
    """A folder whose objects cannot be mapped.

    Args:
        root: the folder.

    Attributes:
        requests: number of ranges and streams that were opened, of keys that end with ".safetensors".
        bytes: bytes that were read of them.
    """

    def __init__(self, root: str | Path) -> None:
        super().__init__(root)
        self._lock = threading.Lock()
        self.requests = self.bytes = 0

    def local_path(self, key: str) -> Path | None:
        return None

    def open(self, key: str) -> BinaryIO:
        stream = super().open(key)
        if not key.endswith(".safetensors"):
            return stream
        with self._lock:
            self.requests += 1
        return _Counted(stream, self)  # type: ignore[return-value]

    def count(self, number: int) -> None:
        """Count bytes that were read."""
        with self._lock:
            self.bytes += number


class _Counted(io.BufferedIOBase):
    def __init__(self, stream: BinaryIO, store: CountingStore) -> None:
        self._stream, self._store = stream, store

    def read(self, size: int | None = -1) -> bytes:
        data = self._stream.read(-1 if size is None else size)
        self._store.count(len(data))
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._stream.seek(offset, whence)

    def close(self) -> None:
        self._stream.close()
        super().close()

    def __exit__(self, *_: Any) -> None:
        self.close()
