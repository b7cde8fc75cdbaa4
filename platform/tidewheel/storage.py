"""One interface over local folders and object stores.

A `Store` is a root URI; keys below it are relative paths that cannot climb out. A write is atomic:
readers see the whole object or none. The writer returns its length and hash, computed while the bytes
are written. Nothing is renamed on an object store.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from blake3 import blake3

from tidewheel import time_limit
from tidewheel.disk_errors import Guarded, closing, readable, unlistable, writable
from tidewheel.errors import StorageAwayError, StorageError

CHUNK_BYTES = 8 << 20
TEMPORARY_PREFIX = ".tmp-"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*|[A-Za-z_][\w.]*:[A-Za-z_]\w*)://")
"""The scheme of a URI: a name, or `module:Class`."""
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")


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


def scheme_of(uri: str) -> str:
    """Return the storage scheme of a URI: its name in lower case, or `module:Class`; "" for a local path."""
    match = _SCHEME.match(uri)
    if match is None:
        return ""
    return match[1] if ":" in match[1] else match[1].lower()


def is_remote(uri: str) -> bool:
    """Return True for URIs of storage schemes such as s3://, and False for local paths and file:// URIs."""
    return scheme_of(str(uri)) not in ("", "file")


def join(uri: str, *parts: str) -> str:
    """Return the URI of `parts` below `uri`."""
    names = [part.strip("/") for part in parts]
    return "/".join([str(uri).rstrip("/"), *(name for name in names if name)]) or "/"


def absolute(uri: str | Path) -> str:
    """Return `uri` in the form that is valid in every process of a cluster: local paths become absolute."""
    return str(uri) if is_remote(str(uri)) else store(uri).uri


def store(uri: str | Path) -> Store:
    """Return the store rooted at `uri`: a local path, or a URI of a storage scheme such as s3://bucket/prefix.

    Raises:
        StorageError: the scheme is unknown, its package is missing, or the URI is incomplete.
    """
    text = str(uri)
    if scheme_of(text):
        from tidewheel.stores import open_uri  # schemes are parts, which rest on this module

        return open_uri(text)
    if match := _ONE_SLASH.match(text):
        from tidewheel.stores import SCHEMES, URI_FIX

        if match[1].lower() in SCHEMES.names():
            raise StorageError("this URI has only one slash after its scheme", where=text, fix=URI_FIX)
    return LocalStore(text)


def split(uri: str | Path) -> tuple[Store, str]:
    """Return the store of a file's folder, and the file's name.

    Raises:
        StorageError: the URI names a folder.
    """
    folder, _, name = str(uri).rpartition("/")
    if name in ("", ".", "..") or folder.endswith(":/"):
        raise StorageError("this names a folder, not a file", where=str(uri), fix="give the path of a file")
    return store(folder or ("/" if str(uri).startswith("/") else ".")), name


def read_text(uri: str | Path) -> str:
    """Return the file at `uri` as UTF-8 text.

    Raises:
        FileNotFoundError: there is no such file.
    """
    folder, name = split(uri)
    return folder.read(name).decode("utf-8")


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
        return store(join(self.uri, *(safe_key(part) for part in parts)))

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


class LocalStore(Store):
    """A folder. Publication is write to a temporary name, fsync, rename.

    Missing folders are made. A root that this store has written to and that disappears is not made again: its disk may
    come back, and would hide what was written meanwhile.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()
        self._written: tuple[str, tuple[int, int]] | None = None  # the newest key, and device and inode of the root
        super().__init__(str(self.root))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_written": None}  # another machine may see another device

    def _require_root(self) -> None:
        """Raise StorageAwayError when the folder that was written to is gone."""
        if self._written is None:
            return
        key, identity = self._written
        with contextlib.suppress(OSError):
            if _identity(self.root) == identity or self._path(key).exists():
                return
        raise StorageAwayError("the folder is gone, or another one is in its place", where=self.uri,
                               fix="mount its disk again, or move the folder back: what was written is in the "
                                   "original folder")

    @contextlib.contextmanager
    def _writable(self, path: Path) -> Iterator[None]:
        """Turn errors of writing `path` into StorageErrors. A folder that is gone is the cause of any other error."""
        try:
            with writable(path):
                yield
        except StorageError:
            self._require_root()
            raise

    def _make_folder(self, path: Path, key: str) -> None:
        """Create the folder of `path`, and identify the root before the first write into it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._written is None:
            self._written = key, _identity(self.root)

    def _path(self, key: str) -> Path:
        return self.root / safe_key(key)

    def open(self, key: str) -> BinaryIO:
        path = self._path(key)
        with readable(path):
            return path.open("rb")

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[Writer]:
        path = self._path(key)
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
        self._require_root()
        with self._writable(path):
            self._make_folder(path, key)
            sink = temporary.open("wb")
        try:
            with closing(sink, path):
                hashing = HashingWriter(key, Guarded(sink, path))
                yield hashing  # what the caller raises here is the caller's own and passes through
                time_limit.current().check()
                with self._writable(path):
                    sink.flush()
                    os.fsync(sink.fileno())
            with self._writable(path):
                os.replace(temporary, path)
                _fsync_folder(path.parent)
                self._written = key, _identity(self.root)
        finally:
            with contextlib.suppress(OSError):  # the error on its way says more
                temporary.unlink(missing_ok=True)

    def create(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
        self._require_root()
        with self._writable(path):
            self._make_folder(path, key)
            try:
                with temporary.open("wb") as sink:
                    sink.write(data)
                    sink.flush()
                    os.fsync(sink.fileno())  # a commit must outlive a power failure, whole
                os.link(temporary, path)
                _fsync_folder(path.parent)
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
        return True

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def size(self, key: str) -> int:
        path = self._path(key)
        with readable(path):
            if path.is_dir():
                raise FileNotFoundError(path)
            return path.stat().st_size

    def uploads(self, prefix: str = "") -> Sequence[Upload]:
        unfinished = []
        for path in (self._path(prefix) if prefix else self.root).rglob(f"{TEMPORARY_PREFIX}*"):
            with contextlib.suppress(FileNotFoundError):  # it has become its object
                unfinished.append(Upload(path.relative_to(self.root).as_posix(), "", path.stat().st_mtime))
        return unfinished

    def abort(self, upload: Upload) -> None:
        self.delete(upload.key)

    def written_at(self, key: str) -> float:
        path = self._path(key)
        with readable(path):
            return path.stat().st_mtime

    def list(self, prefix: str = "") -> Sequence[Stamp]:
        top = self._path(prefix) if prefix else self.root
        entries = []
        for folder, _, names in os.walk(top, onerror=unlistable):
            for name in names:
                if name.startswith(TEMPORARY_PREFIX):
                    continue
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):  # deleted between walk and stat
                    entries.append(Stamp(path.relative_to(self.root).as_posix(), path.stat().st_size, ""))
        return sorted(entries, key=lambda entry: entry.key)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with writable(path), contextlib.suppress(NotADirectoryError):
            path.unlink(missing_ok=True)

    def delete_tree(self, prefix: str) -> None:
        path = self._path(prefix)
        with writable(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            shutil.rmtree(path)

    def local_path(self, key: str) -> Path | None:
        return self._path(key)

    def fingerprint(self, key: str) -> str:
        return self.hash(key)

    def check(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot create the folder: {error.strerror}", where=self.uri,
                               fix="choose another path, or change its owner") from None
        if not os.access(self.root, os.W_OK):
            raise StorageError("the folder is read-only", where=self.uri, fix="choose another path")


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _fsync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
