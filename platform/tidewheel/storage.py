"""Where bytes live: one small interface over local folders and S3-protocol object stores.

A `Store` is a root URI; keys below it are relative paths that cannot climb out. A write is atomic:
readers see the whole object or none, and the writer returns its length and hash, computed while the
bytes streamed by. Nothing is ever renamed on an object store.
"""

from __future__ import annotations

import contextlib
import fnmatch
import io
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from urllib.parse import urlsplit

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
    return urlsplit(str(uri)).scheme == "s3"


def join(uri: str, *parts: str) -> str:
    """`uri` with `parts` below it."""
    return "/".join([str(uri).rstrip("/"), *(part.strip("/") for part in parts if part)])


def store(uri: str | Path) -> Store:
    """The store rooted at `uri`: a local path, file:///path, or s3://bucket/prefix.

    Raises:
        StorageError: the scheme is unknown or the URI has no bucket.
    """
    text = str(uri)
    parts = urlsplit(text)
    if parts.scheme == "s3":
        if not parts.netloc:
            raise StorageError("no bucket in the URI", where=text, mend="write s3://bucket/prefix")
        return S3Store(text.rstrip("/"))
    if parts.scheme == "file":
        return LocalStore(parts.path)
    if parts.scheme and "://" in text:
        raise StorageError(f"unknown storage scheme {parts.scheme!r}", where=text,
                           mend="use a local path, file:///path or s3://bucket/prefix")
    return LocalStore(text)


def split(uri: str | Path) -> tuple[Store, str]:
    """The store of a file's folder, and the file's name."""
    folder, _, name = str(uri).rpartition("/")
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
        """Remove everything below the folder `prefix`."""
        for entry in self.list(prefix):
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


class _HashingWriter:
    """Passes bytes on to a file object and hashes them on the way."""

    def __init__(self, key: str, sink: Any) -> None:
        self._key, self._sink, self._hash, self._bytes = key, sink, blake3(), 0

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
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
        return self._path(key).open("rb")

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[Writer]:
        path = self._path(key)
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex[:12]}-{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as sink:
                hashing = _HashingWriter(key, sink)
                yield hashing
                sink.flush()
                os.fsync(sink.fileno())
            os.replace(temporary, path)
            _fsync_folder(path.parent)
        except PermissionError:
            raise StorageError("no permission to write", where=str(path),
                               mend="choose another output folder, or change its owner") from None
        except OSError as error:
            raise StorageError(f"cannot write: {error.strerror}", where=str(path),
                               mend="check free space and that the path is a folder you own") from error
        finally:
            temporary.unlink(missing_ok=True)

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def size(self, key: str) -> int:
        return self._path(key).stat().st_size

    def list(self, prefix: str = "") -> Sequence[Stamp]:
        top = self._path(prefix) if prefix else self.root
        found = []
        for folder, _, names in os.walk(top):
            for name in names:
                if name.startswith(TEMPORARY_PREFIX):
                    continue
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):  # deleted between walk and stat
                    found.append(Stamp(path.relative_to(self.root).as_posix(), path.stat().st_size, ""))
        return sorted(found, key=lambda entry: entry.key)

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def delete_tree(self, prefix: str) -> None:
        shutil.rmtree(self._path(prefix), ignore_errors=True)

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


def _fsync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class S3Store(Store):
    """A prefix of a bucket, through s3fs. Credentials and endpoint come from the environment
    (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL) or the machine's role."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.path = uri.removeprefix("s3://")
        self.bucket = self.path.partition("/")[0]

    def __reduce__(self):
        return (S3Store, (self.uri,))

    @property
    def fs(self) -> Any:
        return _s3_filesystem(os.getpid(), os.environ.get("AWS_ENDPOINT_URL", ""),
                              os.environ.get("AWS_ACCESS_KEY_ID", ""))

    def _path(self, key: str) -> str:
        return f"{self.path}/{safe_key(key)}"

    @contextlib.contextmanager
    def _explained(self, key: str = "") -> Iterator[None]:
        """Turn the client's errors into ours; FileNotFoundError for an object passes through."""
        import botocore.exceptions as bx

        where = join(self.uri, key)
        try:
            yield
        except FileNotFoundError as error:
            if "bucket" in str(error).lower():
                raise self._no_bucket() from None
            raise
        except (PermissionError, bx.NoCredentialsError, bx.PartialCredentialsError) as error:
            raise StorageError(f"access refused ({type(error).__name__}: {_short(error)})", where=where,
                               mend="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a role that may read "
                                    "and write this bucket; `tidewheel doctor --storage URI` tests it") from None
        except (bx.EndpointConnectionError, bx.ConnectTimeoutError) as error:
            raise StorageError(f"the object store does not answer ({_short(error)})", where=where,
                               mend="check AWS_ENDPOINT_URL and that the server is up") from None
        except OSError as error:
            if "NoSuchBucket" in str(error) or "specified bucket" in str(error):
                raise self._no_bucket() from None
            raise StorageError(f"the object store failed ({_short(error)})", where=where,
                               mend="try again; if it persists, check the store's own health") from error

    def _no_bucket(self) -> StorageError:
        return StorageError(f"there is no bucket {self.bucket!r}", where=self.uri,
                            mend="create the bucket or correct the URI; AWS_ENDPOINT_URL chooses the server")

    def open(self, key: str) -> BinaryIO:
        with self._explained(key):
            return io.BufferedReader(self.fs.open(self._path(key), "rb", block_size=CHUNK_BYTES), CHUNK_BYTES)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        with self._explained(key):
            return self.fs.cat_file(self._path(key), start=start or None,
                                    end=None if length is None else start + length)

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[Writer]:
        with self._explained(key):
            sink = self.fs.open(self._path(key), "wb", block_size=CHUNK_BYTES, autocommit=False)
            hashing = _HashingWriter(key, sink)
            try:
                yield hashing
                sink.close()
            except BaseException:
                with contextlib.suppress(Exception):  # the first error is the one to tell
                    sink.discard()
                sink.closed = True
                raise
            sink.commit()

    def exists(self, key: str) -> bool:
        with self._explained(key):
            return self.fs.exists(self._path(key))

    def size(self, key: str) -> int:
        with self._explained(key):
            return int(self.fs.info(self._path(key))["size"])

    def list(self, prefix: str = "") -> Sequence[Stamp]:
        top = self._path(prefix) if prefix else self.path
        with self._explained(prefix):
            try:
                found = self.fs.find(top, detail=True)
            except FileNotFoundError as error:
                if "bucket" in str(error).lower():
                    raise
                return []
        cut = len(self.path) + 1
        return sorted((Stamp(path[cut:], int(info["size"]), "") for path, info in found.items()
                       if path.startswith(top + "/")), key=lambda entry: entry.key)

    def delete(self, key: str) -> None:
        with self._explained(key), contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self._path(key))

    def local_path(self, key: str) -> Path | None:
        return None

    def fingerprint(self, key: str) -> str:
        with self._explained(key):
            info = self.fs.info(self._path(key), refresh=True)
        return f"etag-{info['size']}-{str(info.get('ETag', '')).strip(chr(34))}"

    def check(self) -> None:
        with self._explained():
            try:
                self.fs.call_s3("list_objects_v2", Bucket=self.bucket, MaxKeys=1)
            except FileNotFoundError:
                raise self._no_bucket() from None


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


@lru_cache(maxsize=8)
def _s3_filesystem(pid: int, endpoint: str, key_id: str) -> Any:
    """One client per process, endpoint and identity: s3fs clients do not survive a fork."""
    import s3fs

    return s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True, default_cache_type="readahead",
                             config_kwargs={"connect_timeout": 5, "read_timeout": 60,
                                            "retries": {"max_attempts": 5, "mode": "standard"}})
