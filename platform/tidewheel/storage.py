"""Where bytes live: one small interface over local folders and S3-protocol object stores.

A `Store` is a root URI; keys below it are relative paths that cannot climb out. A write is atomic:
readers see the whole object or none, and the writer returns its length and hash, computed while the
bytes streamed by. Nothing is ever renamed on an object store.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from urllib.parse import unquote

from blake3 import blake3

from tidewheel.errors import StorageError

CHUNK_BYTES = 8 << 20
TEMPORARY_PREFIX = ".tmp-"


@dataclass(frozen=True)
class Stamp:
    """What was written: key, length in bytes, and content hash ("blake3-" and 64 hex digits)."""

    key: str
    bytes: int
    hash: str


class Writer(Protocol):
    """A binary sink whose content appears under its key, whole, when the `with` block ends well."""

    @property
    def stamp(self) -> Stamp: ...

    def write(self, data: Any, /) -> int: ...


def content_hash(data: bytes | memoryview) -> str:
    """Content hash of bytes, in the form of `Stamp.hash`."""
    return "blake3-" + blake3(data).hexdigest()


def is_remote(uri: str) -> bool:
    """True for object-store URIs, False for local paths and file:// URIs."""
    return str(uri).lower().startswith("s3://")


def join(uri: str, *parts: str) -> str:
    """`uri` with `parts` below it."""
    names = [part.strip("/") for part in parts]
    return "/".join([str(uri).rstrip("/"), *(name for name in names if name)]) or "/"


def absolute(uri: str | Path) -> str:
    """`uri` as every process of a cluster would write it: local paths made absolute, others as they are."""
    return str(uri) if is_remote(str(uri)) else store(uri).uri


def store(uri: str | Path) -> Store:
    """The store rooted at `uri`: a local path, file:///path, or s3://bucket/prefix.

    Raises:
        StorageError: the scheme is unknown or the URI has no bucket.
    """
    text = str(uri)
    scheme, sep, rest = text.partition("://")
    if scheme.lower() == "s3" and sep:
        if not rest.strip("/") or rest.startswith("/"):
            raise StorageError("no bucket in the URI", where=text, mend="write s3://bucket/prefix")
        if "@" in rest.partition("/")[0]:
            raise StorageError("a user or password in the URI", where=text,
                               mend="write s3://bucket/prefix; credentials are read from AWS_ACCESS_KEY_ID and "
                                    "AWS_SECRET_ACCESS_KEY, or are the machine's role")
        from tidewheel.s3 import S3Store  # the S3 client is imported by those who use it

        return S3Store("s3://" + rest.rstrip("/"))
    if scheme.lower() == "file" and sep:
        host, _, path = rest.partition("/")
        if host not in ("", "localhost"):
            raise StorageError(f"{host!r} is in the place of a host", where=text, mend="write file:///absolute/path")
        return LocalStore("/" + unquote(path))
    if text.lower().startswith("s3:/") or (sep and scheme.isalnum()):
        raise StorageError("not a URI that can be stored to", where=text,
                           mend="use a local path, file:///path or s3://bucket/prefix")
    return LocalStore(text)


def split(uri: str | Path) -> tuple[Store, str]:
    """The store of a file's folder, and the file's name."""
    folder, _, name = str(uri).rpartition("/")
    if name in ("", ".", "..") or folder.lower() == "s3:/":
        raise StorageError("this names a folder, not a file", where=str(uri), mend="give the path of a file")
    return store(folder or ("/" if str(uri).startswith("/") else ".")), name


def read_text(uri: str | Path) -> str:
    """The file at `uri` as UTF-8 text; FileNotFoundError when there is none."""
    place, name = split(uri)
    return place.read(name).decode("utf-8")


class Store:
    """Bytes under a root URI. Keys are relative, with "/" between parts."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def __repr__(self) -> str:
        return f"store({self.uri!r})"

    # -- what each kind of store provides ------------------------------------------------------
    def open(self, key: str) -> BinaryIO:
        """A seekable binary stream; FileNotFoundError when there is no such object."""
        raise NotImplementedError

    def writer(self, key: str) -> contextlib.AbstractContextManager[Writer]:
        """An atomic writer: the object appears when the block ends, and not at all if it raises."""
        raise NotImplementedError

    def exists(self, key: str) -> bool:
        raise NotImplementedError

    def list(self, prefix: str = "") -> Sequence[Stamp]:
        """Every object below the folder `prefix`, sorted by key, hash left empty."""
        raise NotImplementedError

    def delete(self, key: str) -> None:
        """Remove one object; none there is no error."""
        raise NotImplementedError

    def local_path(self, key: str) -> Path | None:
        """The path of `key` on this machine's file system, or None: it cannot be memory-mapped."""
        raise NotImplementedError

    def fingerprint(self, key: str) -> str:
        """Identity of an object's content: its hash (local), or length and ETag (object store)."""
        raise NotImplementedError

    def check(self) -> None:
        """Fail early and clearly when this place cannot be used.

        Raises:
            StorageError: missing bucket, refused credentials, no such endpoint, no permission.
        """
        raise NotImplementedError

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless there is one; True if this call made it.

        Atomic on local folders, and on object stores that honour If-None-Match; some ignore it and overwrite.
        """
        raise NotImplementedError

    # -- built on the above --------------------------------------------------------------------
    def child(self, *parts: str) -> Store:
        """The store one or more folders down."""
        return store(join(self.uri, *(safe_key(part) for part in parts)))

    def at(self, key: str) -> str:
        """The full URI of `key`."""
        return join(self.uri, safe_key(key))

    def size(self, key: str) -> int:
        """Length of an object in bytes."""
        with self.open(key) as stream:
            return stream.seek(0, os.SEEK_END)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes [start, start + length) of an object, or all of it."""
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
        """A JSON object; StorageError when it does not parse."""
        try:
            return json.loads(self.read(key))
        except ValueError as error:
            raise StorageError(f"not valid JSON ({error})", where=self.at(key),
                               mend="the file is damaged: delete it and run again") from None

    def write_json(self, key: str, value: Any) -> Stamp:
        """Write `value` as indented JSON with sorted keys (equal values give equal bytes)."""
        return self.write(key, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())

    def glob(self, pattern: str) -> Sequence[str]:
        """Keys that match a pattern with * and ?; "**" crosses folders, "*" does not."""
        pattern = "/".join(part for part in pattern.split("/") if part not in ("", "."))
        fixed: list[str] = []
        for part in pattern.split("/")[:-1]:
            if any(mark in part for mark in "*?["):
                break
            fixed.append(part)
        return [entry.key for entry in self.list("/".join(fixed)) if _matches(entry.key, pattern)]

    def hash(self, key: str) -> str:
        """Content hash of a stored object, read in chunks."""
        digest = blake3()
        with self.open(key) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
        return "blake3-" + digest.hexdigest()

    def verify(self, stamp: Stamp) -> str:
        """"" when the stored object is what `stamp` says, else what differs."""
        try:
            size = self.size(stamp.key)
        except FileNotFoundError:
            return "missing"
        if size != stamp.bytes:
            return f"{size} bytes, expected {stamp.bytes}"
        return "" if self.hash(stamp.key) == stamp.hash else "hash differs: the content has changed"

    def delete_tree(self, prefix: str) -> None:
        """Remove everything below the folder `prefix`; none there is no error."""
        for entry in self.list(safe_key(prefix)):
            self.delete(entry.key)


def safe_key(key: str) -> str:
    """`key` itself, if it stays below its root.

    Raises:
        StorageError: the key is empty, absolute, or climbs with "..".
    """
    parts = key.split("/")
    if not key or key.startswith("/") or "\\" in key or "\x00" in key or any(part in ("..", ".", "") for part in parts):
        raise StorageError(f"the path {key!r} would leave its folder", where="storage",
                           mend="paths in manifests are relative, without '..'; the manifest is damaged or hostile")
    return key


def _matches(key: str, pattern: str) -> bool:
    def walk(names: list[str], globs: list[str]) -> bool:
        if not globs:
            return not names
        if globs[0] == "**":
            return any(walk(names[skip:], globs[1:]) for skip in range(len(names) + 1))
        return bool(names) and fnmatch.fnmatchcase(names[0], globs[0]) and walk(names[1:], globs[1:])

    return walk(key.split("/"), pattern.split("/"))


class HashingWriter:
    """Passes bytes on to a file object and hashes them on the way."""

    def __init__(self, key: str, sink: Any) -> None:
        self._key, self._sink, self._hash, self._bytes = key, sink, blake3(), 0

    def write(self, data: Any, /) -> int:
        view = memoryview(data)
        if view.nbytes == 0:
            return 0
        view = view.cast("B")
        self._hash.update(view)
        self._bytes += view.nbytes
        self._sink.write(view)
        return view.nbytes

    def flush(self) -> None:
        """pyarrow calls this on its sinks; the publish at the end is what counts."""

    @property
    def closed(self) -> bool:
        return False

    @property
    def stamp(self) -> Stamp:
        return Stamp(self._key, self._bytes, "blake3-" + self._hash.hexdigest())


class LocalStore(Store):
    """A folder. Publication is write to a temporary name, fsync, rename."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()
        super().__init__(str(self.root))

    def _path(self, key: str) -> Path:
        return self.root / safe_key(key)

    def open(self, key: str) -> BinaryIO:
        path = self._path(key)
        with _readable(path):
            return path.open("rb")

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[Writer]:
        path = self._path(key)
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
        with _writable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            sink = temporary.open("wb")
        try:
            with sink:
                hashing = HashingWriter(key, _Guarded(sink, path))
                yield hashing  # what the caller raises here is the caller's own and passes through
                with _writable(path):
                    sink.flush()
                    os.fsync(sink.fileno())
            with _writable(path):
                os.replace(temporary, path)
                _fsync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)

    def create(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
        with _writable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
        return True

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def size(self, key: str) -> int:
        path = self._path(key)
        with _readable(path):
            if path.is_dir():
                raise FileNotFoundError(path)
            return path.stat().st_size

    def list(self, prefix: str = "") -> Sequence[Stamp]:
        top = self._path(prefix) if prefix else self.root
        found = []
        for folder, _, names in os.walk(top, onerror=_unlistable):
            for name in names:
                if name.startswith(TEMPORARY_PREFIX):
                    continue
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):  # deleted between walk and stat
                    found.append(Stamp(path.relative_to(self.root).as_posix(), path.stat().st_size, ""))
        return sorted(found, key=lambda entry: entry.key)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with _writable(path), contextlib.suppress(NotADirectoryError):
            path.unlink(missing_ok=True)

    def delete_tree(self, prefix: str) -> None:
        path = self._path(prefix)
        with _writable(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
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
                               mend="choose another path, or change its owner") from None
        if not os.access(self.root, os.W_OK):
            raise StorageError("the folder is read-only", where=self.uri, mend="choose another path")


class _Guarded:
    """A file object whose write errors are told as ours."""

    def __init__(self, sink: BinaryIO, path: Path) -> None:
        self._sink, self._path = sink, path

    def write(self, data: Any, /) -> int:
        with _writable(self._path):
            return self._sink.write(data)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Missing files stay FileNotFoundError; what else the system says becomes a StorageError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except NotADirectoryError:
        raise FileNotFoundError(path) from None
    except IsADirectoryError:
        raise StorageError("this is a folder, not a file", where=str(path), mend="give the path of a file") from None
    except PermissionError:
        raise StorageError("no permission to read", where=str(path), mend="change its owner or its mode") from None
    except OSError as error:
        raise StorageError(f"cannot read: {error.strerror}", where=str(path), mend="check the disk") from None


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError:
        raise StorageError("no permission to write", where=str(path),
                           mend="choose another output folder, or change its owner") from None
    except OSError as error:
        raise StorageError(f"cannot write: {error.strerror}", where=str(path),
                           mend="check free space and that the path is a folder you own") from None


def _unlistable(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise StorageError(f"cannot list: {error.strerror}", where=str(error.filename),
                           mend="change the folder's owner or mode")


def _fsync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
