"""What every store provides, whatever holds its bytes: the interface, keys, stamps, and a sink that hashes."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from blake3 import blake3

from tidewheel.errors import StorageError

CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Stamp:
    """Key, length in bytes, and content hash ("blake3-" and 64 hex digits) of a written object."""

    key: str
    bytes: int
    hash: str


@dataclass(frozen=True)
class Upload:
    """An unfinished write, in progress or left behind by a killed writer."""

    key: str
    """Key of the future object; in a folder, of the temporary file."""
    id: str
    started: float
    """Unix time, by the store's clock; in a folder, when the file was last written to."""


class Writer(Protocol):
    """Binary sink whose content appears as a whole under its key when the `with` block ends without an error."""

    @property
    def stamp(self) -> Stamp:
        """Key, length and hash of the content written so far."""
        ...

    def write(self, data: Any, /) -> int:
        """Write bytes; return their number."""
        ...


def content_hash(data: bytes | memoryview) -> str:
    """Return the content hash of bytes, as in `Stamp.hash`."""
    return "blake3-" + blake3(data).hexdigest()


def join(uri: str, *parts: str) -> str:
    """Return the URI of `parts` below `uri`."""
    names = [part.strip("/") for part in parts]
    return "/".join([str(uri).rstrip("/"), *(name for name in names if name)]) or "/"


class Store:
    """Bytes under a root URI. Keys are relative, with "/" between parts."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def __repr__(self) -> str:
        return f"store({self.uri!r})"

    # -- what each kind of store provides ------------------------------------------------------
    def open(self, key: str) -> BinaryIO:
        """Open a seekable binary stream.

        Raises:
            FileNotFoundError: there is no such object.
        """
        raise NotImplementedError

    def writer(self, key: str) -> contextlib.AbstractContextManager[Writer]:
        """Return an atomic writer: the object appears when the block ends, and not at all if it raises."""
        raise NotImplementedError

    def exists(self, key: str) -> bool:
        """Return whether an object exists."""
        raise NotImplementedError

    def list(self, prefix: str = "") -> Sequence[Stamp]:
        """Return every object below the folder `prefix`, sorted by key, without hashes."""
        raise NotImplementedError

    def list_named(self, folder: str, beginning: str) -> Sequence[Stamp]:
        """Return the objects of `list(folder)` whose names begin with `beginning`. Object stores list only those."""
        return [entry for entry in self.list(folder) if entry.key.startswith(f"{folder}/{beginning}")]

    def delete(self, key: str) -> None:
        """Remove one object. A missing one is no error."""
        raise NotImplementedError

    def local_path(self, key: str) -> Path | None:
        """Return the path of `key` on this machine, or None when it cannot be memory-mapped."""
        raise NotImplementedError

    def fingerprint(self, key: str) -> str:
        """Return the identity of an object's content: its hash (local), or its length and ETag (object store)."""
        raise NotImplementedError

    def check(self) -> None:
        """Check that this store can be used.

        Raises:
            StorageError: missing bucket, refused credentials, no such endpoint, no permission.
        """
        raise NotImplementedError

    def check_writable(self) -> None:
        """Check that this kind of store can be written to. Sends no request.

        Raises:
            StorageError: it is read-only.
        """

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless it exists; return whether this call made it.

        Atomic in local folders, and on object stores that honour the condition; some ignore it and overwrite, see
        `conditional_create`. A request to an object store may be sent twice, so an object with the same content counts
        as made by this call: competing writers must write different bytes.
        """
        raise NotImplementedError

    def uploads(self, prefix: str = "") -> Sequence[Upload]:
        """Return the unfinished writes below the folder `prefix`: uploads in parts, or temporary files."""
        raise NotImplementedError

    def abort(self, upload: Upload) -> None:
        """Give up an upload and delete its parts. A missing one is no error."""
        raise NotImplementedError

    def written_at(self, key: str) -> float:
        """Return the Unix time at which an object was written, by the store's clock.

        Raises:
            FileNotFoundError: there is no such object.
        """
        raise NotImplementedError

    def identity(self) -> str:
        """Return what tells this store's server and credentials from others': for an object store the bucket with a
        hash of endpoint and credentials, for a folder its path."""
        return self.uri

    # -- built on the above --------------------------------------------------------------------
    def child(self, *parts: str) -> Store:
        """Return the store one or more folders down."""
        from tidewheel import storage  # which knows the schemes, and rests on this module

        return storage.store(join(self.uri, *(safe_key(part) for part in parts)))

    def at(self, key: str) -> str:
        """Return the full URI of `key`."""
        return join(self.uri, safe_key(key))

    def size(self, key: str) -> int:
        """Return the length of an object in bytes."""
        with self.open(key) as stream:
            return stream.seek(0, os.SEEK_END)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return bytes [start, start + length) of an object.

        Args:
            key: key of the object.
            start: offset of the first byte.
            length: number of bytes; None for all from `start` on.
        """
        with self.open(key) as stream:
            if start:
                stream.seek(start)
            return stream.read(-1 if length is None else length)

    def write(self, key: str, data: bytes | memoryview) -> Stamp:
        """Write `data` atomically."""
        with self.writer(key) as sink:
            sink.write(data)
        return sink.stamp

    def read_json(self, key: str) -> Any:
        """Return a JSON value.

        Raises:
            StorageError: the object is not valid JSON.
        """
        try:
            return json.loads(self.read(key))
        except ValueError as error:
            raise StorageError(f"not valid JSON ({error})", where=self.at(key),
                               fix="the file is damaged: delete it and run again") from None

    def write_json(self, key: str, value: object) -> Stamp:
        """Write `value` as indented JSON with sorted keys (equal values give equal bytes)."""
        return self.write(key, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())

    def glob(self, pattern: str) -> Sequence[str]:
        """Return the keys that match a pattern with * and ?; "**" crosses folders, "*" does not."""
        pattern = "/".join(part for part in pattern.split("/") if part not in ("", "."))
        fixed: list[str] = []
        for part in pattern.split("/")[:-1]:
            if any(mark in part for mark in "*?["):
                break
            fixed.append(part)
        return [entry.key for entry in self.list("/".join(fixed)) if matches(entry.key, pattern)]

    def hash(self, key: str) -> str:
        """Return the content hash of a stored object, read in chunks."""
        digest = blake3()
        with self.open(key) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
        return "blake3-" + digest.hexdigest()

    def verify(self, stamp: Stamp) -> str:
        """Return "" when the stored object matches `stamp`, else what differs."""
        try:
            size = self.size(stamp.key)
        except FileNotFoundError:
            return "missing"
        if size != stamp.bytes:
            return f"{size} bytes, expected {stamp.bytes}"
        return "" if self.hash(stamp.key) == stamp.hash else "hash differs: the content has changed"

    def abort_uploads(self, prefix: str = "", *, before: float) -> int:
        """Give up uploads below the folder `prefix` that began before the Unix time `before`; return their number."""
        old = [upload for upload in self.uploads(prefix) if upload.started < before]
        for upload in old:
            self.abort(upload)
        return len(old)

    def delete_tree(self, prefix: str) -> None:
        """Remove everything below the folder `prefix`."""
        for entry in self.list(safe_key(prefix)):
            self.delete(entry.key)


def safe_key(key: str) -> str:
    """Return `key` if it stays below its root.

    Raises:
        StorageError: the key is empty, absolute, or climbs with "..".
    """
    parts = key.split("/")
    if not key or key.startswith("/") or "\\" in key or "\x00" in key or any(part in ("..", ".", "") for part in parts):
        raise StorageError(f"the path {key!r} would leave its folder", where="storage",
                           fix="paths in manifests are relative, without '..'; the manifest is damaged or hostile")
    return key


def matches(key: str, pattern: str) -> bool:
    """Return whether a key matches a pattern with *, ? and [...]; "**" crosses folders, "*" does not."""
    def walk(names: list[str], globs: list[str]) -> bool:
        if not globs:
            return not names
        if globs[0] == "**":
            return any(walk(names[skip:], globs[1:]) for skip in range(len(names) + 1))
        return bool(names) and fnmatch.fnmatchcase(names[0], globs[0]) and walk(names[1:], globs[1:])

    return walk(key.split("/"), pattern.split("/"))


class HashingWriter:
    """Sink that hashes bytes and passes them on to a file object."""

    def __init__(self, key: str, sink: Any) -> None:
        self._key, self._sink, self._hash, self._bytes = key, sink, blake3(), 0

    def write(self, data: Any, /) -> int:
        """Write bytes; return their number."""
        view = memoryview(data)
        if view.nbytes == 0:
            return 0
        view = view.cast("B")
        self._hash.update(view)
        self._bytes += view.nbytes
        self._sink.write(view)
        return view.nbytes

    def flush(self) -> None:
        """Do nothing. pyarrow calls this on its sinks; only the publication at the end matters."""

    @property
    def closed(self) -> bool:
        """False, because the store closes the sink, not its user."""
        return False

    @property
    def stamp(self) -> Stamp:
        """Key, length and hash of the content written so far."""
        return Stamp(self._key, self._bytes, "blake3-" + self._hash.hexdigest())
