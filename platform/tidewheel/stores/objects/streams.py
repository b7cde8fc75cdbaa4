"""Objects as streams: a seekable reader of ranges, and a sender that uploads in parts."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tidewheel.errors import StorageError
from tidewheel.storage import safe_key
from tidewheel.stores.objects.service import Part, Problem

if TYPE_CHECKING:
    from tidewheel.stores.objects.store import ObjectStore

logger = logging.getLogger(__name__)
PART_BYTES = 16 << 20
"""Length of every part but the last. S3 takes 10,000 parts, so objects of up to 160 GiB; Azure takes 50,000. Google
asks for a multiple of 256 KiB."""
PART_SECONDS = 0.5
"""The completion of an upload gets this much time for each part: stores take minutes for thousands."""


class Reader(io.RawIOBase):
    """Seekable stream of an object, with ranged reads. Wrap it in io.BufferedReader to read ahead.

    Args:
        store: store of the object.
        key: key of the object.
        size: its length in bytes.
    """

    def __init__(self, store: ObjectStore, key: str, size: int) -> None:
        self._store = store
        self._key = key
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"cannot seek to {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        data = self._take(view.nbytes)
        view[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        return self._take(self._size)

    def _take(self, length: int) -> bytes:
        """Return up to `length` bytes from the position on, and move it."""
        end = min(self._size, self._position + length)
        if self._position >= end:
            return b""
        data = self._store.read(self._key, self._position, end - self._position)
        if len(data) != end - self._position:
            raise StorageError(f"got {len(data)} bytes instead of {end - self._position}",
                               where=self._store.at(self._key), fix="the object changed while it was read: try again")
        self._position += len(data)
        return data


class Sender:
    """Sink that buffers bytes and sends them at `finish` as one object, or in parts if they are many.

    Args:
        store: store of the object.
        key: key of the object.
    """

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store = store
        self._service = store.service
        self._key = safe_key(key)
        self._name = store.name(key)
        self._buffer = bytearray()
        self._upload = ""
        self._parts: list[Any] = []
        self._sent = 0
        self._md5 = hashlib.md5(usedforsecurity=False)

    def write(self, data: Any, /) -> int:
        """Buffer bytes, and send complete parts; return the number of bytes."""
        view = memoryview(data)
        for begin in range(0, view.nbytes, PART_BYTES):
            self._add(view[begin:begin + PART_BYTES])
        return view.nbytes

    def _add(self, piece: memoryview) -> None:
        """Add up to a part's bytes. A full buffer waits for more, so that the last part is never empty."""
        room = PART_BYTES - len(self._buffer)
        self._buffer += piece[:room]
        if piece.nbytes > room:
            with self._store.explained(self._key):
                self._send_part(is_last=False)
            self._buffer += piece[room:]

    def finish(self) -> None:
        """Publish. Until this returns, readers see what was there before."""
        with self._store.explained(self._key):
            if not self._upload:
                self._store.ask("put", self._name, bytes(self._buffer), create=False, nbytes=len(self._buffer))
                return
            length = self._sent + len(self._buffer)
            try:
                self._send_part(is_last=True)
                self._store.ask("complete", self._upload, self._name, self._parts, self._md5.digest(),
                                extra_seconds=PART_SECONDS * len(self._parts))
            except self._service.errors() as error:
                # an earlier try may have completed the upload, and only its answer was lost
                if self._service.problem(error) is not Problem.NO_UPLOAD or self._store.size(self._key) != length:
                    raise

    def abort(self) -> None:
        """Give up the upload by one try. A failure is only logged: the error on its way matters more, and
        `Store.uploads` lists what is left."""
        if not self._upload:
            return
        once = replace(self._store.policy, budget_seconds=0.0)
        try:
            self._store.ask("abort", self._upload, self._name, policy=once)
        except Exception as error:
            logger.info("an upload of %s was not aborted: %s", self._store.at(self._key), error)

    def _send_part(self, is_last: bool) -> None:
        """Send the buffer as the next part."""
        data = bytes(self._buffer)
        if not self._upload:
            asks = self._service.begins_by_request
            self._upload = self._store.ask("begin", self._name) if asks else uuid.uuid4().hex
        part = Part(self._upload, self._name, len(self._parts) + 1, self._sent, data, is_last)
        self._parts.append(self._store.ask("send_part", part, nbytes=len(data)))
        if self._service.uses_md5:
            self._md5.update(data)
        self._sent += len(data)
        self._buffer.clear()
