"""Stores in S3-protocol object stores (AWS, MinIO, Ceph, R2, moto), over s3fs's client.

Objects are written whole: one PUT when small, else a multipart upload that is completed at the end or
aborted. Nothing is visible under a key before that, and nothing is ever renamed.

What a store does on a bad day (500, 503 SlowDown, a reset connection, a body that ends early) is tried again: three
times by botocore, three times by s3fs, and `ATTEMPTS` times here, with full jitter. Every request may be repeated: an
object's content is the same whoever wrote it, and a completed upload that is completed again is recognised.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from tidewheel.errors import StorageAwayError, StorageError
from tidewheel.storage import CHUNK_BYTES, HashingWriter, Stamp, Store, Writer, join, safe_key

PART_BYTES = 16 << 20  # of a multipart upload: 10,000 parts at most, so objects up to 160 GiB
DELETE_BATCH = 1000  # the protocol's limit for one DeleteObjects call
IDENTITY = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION")
ATTEMPTS = 6
WAIT_SECONDS, WAIT_AT_MOST = 0.2, 8.0
"""Waits are random up to 0.2, 0.4, 0.8 ... seconds ("full jitter", M. Brooker, AWS Architecture Blog, 2015)."""
TRANSIENT_CODES = frozenset({"InternalError", "SlowDown", "ServiceUnavailable", "RequestTimeout", "Throttling",
                             "ThrottlingException", "RequestLimitExceeded", "500", "502", "503", "504"})
T = TypeVar("T")
_buckets_seen: set[tuple[str, str]] = set()


class S3Store(Store):
    """A prefix of a bucket. Credentials and endpoint come from the environment (AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL) or the machine's role. Safe to use from several threads."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.path = uri.removeprefix("s3://")
        self.bucket, _, self.prefix = self.path.partition("/")

    def __reduce__(self) -> tuple[Any, ...]:
        return (S3Store, (self.uri,))

    @property
    def fs(self) -> Any:
        """The s3fs client of this process for the identity and endpoint now in the environment."""
        identity = "\0".join(os.environ.get(name, "") for name in IDENTITY)
        return _s3_filesystem(os.getpid(), hashlib.sha256(identity.encode()).hexdigest())

    def _path(self, key: str) -> str:
        return f"{self.path}/{safe_key(key)}"

    def call(self, method: str, key: str, **arguments: Any) -> Any:
        """One request of the S3 protocol about `key`, for example call("head_object", "a/b")."""
        name = self._path(key).partition("/")[2]
        return _patiently(lambda: self.fs.call_s3(method, Bucket=self.bucket, Key=name, **arguments))

    def open(self, key: str) -> BinaryIO:
        size = self.size(key)
        return cast(BinaryIO, io.BufferedReader(_Reader(self, key, size), CHUNK_BYTES))

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            self.size(key)  # a missing object is missing here too
            return b""
        with self._explained(key):
            try:
                # one request: the client's parallel ranges of a whole file are not tried again when one breaks off
                return _patiently(lambda: self.fs.cat_file(
                    self._path(key), start=start or None, end=None if length is None else start + length,
                    max_concurrency=1))
            except OSError as error:
                if _code(error) == "InvalidRange":  # begins at or behind the end
                    return b""
                raise

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[Writer]:
        upload = _Upload(self, key)
        hashing = HashingWriter(key, upload)
        try:
            yield hashing
            upload.finish()
        except BaseException:
            upload.abort()
            raise

    def create(self, key: str, data: bytes) -> bool:
        with self._explained(key):
            try:
                self.call("put_object", key, Body=data, IfNoneMatch="*")
            except OSError as error:
                if _code(error) in ("PreconditionFailed", "ConditionalRequestConflict", "412", "409"):
                    return False
                raise
        return True

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except FileNotFoundError:
            return False
        return True

    def size(self, key: str) -> int:
        with self._explained(key):
            return int(self.call("head_object", key)["ContentLength"])

    def list(self, prefix: str = "") -> Sequence[Stamp]:
        top = self._path(prefix) if prefix else self.path
        with self._explained(prefix):
            found = _patiently(lambda: self.fs.find(top, detail=True))
            if not found:
                self._require_bucket()
        cut = len(self.path) + 1
        return sorted((Stamp(path[cut:], int(info["size"]), "") for path, info in found.items()
                       if path.startswith(top + "/") and not path.endswith("/")), key=lambda entry: entry.key)

    def delete(self, key: str) -> None:
        with self._explained(key):
            self.call("delete_object", key)

    def delete_tree(self, prefix: str) -> None:
        names = [self._path(entry.key).partition("/")[2] for entry in self.list(safe_key(prefix))]
        for begin in range(0, len(names), DELETE_BATCH):
            batch = {"Objects": [{"Key": name} for name in names[begin:begin + DELETE_BATCH]], "Quiet": True}
            with self._explained(prefix):
                refused = _patiently(functools.partial(self.fs.call_s3, "delete_objects", Bucket=self.bucket,
                                                       Delete=batch)).get("Errors")
            if refused:
                raise StorageError(f"{len(refused)} objects cannot be deleted ({refused[0].get('Code')})",
                                   where=join(self.uri, prefix), mend="allow s3:DeleteObject on this bucket")

    def local_path(self, key: str) -> Path | None:
        return None

    def fingerprint(self, key: str) -> str:
        with self._explained(key):
            info = self.call("head_object", key)
        return f"etag-{info['ContentLength']}-{str(info.get('ETag', '')).strip(chr(34))}"

    def check(self) -> None:
        with self._explained():
            _patiently(lambda: self.fs.call_s3("list_objects_v2", Bucket=self.bucket, MaxKeys=1))

    # -- errors --------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _explained(self, key: str = "") -> Iterator[None]:
        """Turn the client's errors into ours; FileNotFoundError passes, if it is the object that is missing."""
        import aiohttp
        import botocore.exceptions as bx

        where = join(self.uri, key)
        try:
            yield
        except FileNotFoundError:
            self._require_bucket()
            raise FileNotFoundError(where) from None
        except (PermissionError, bx.NoCredentialsError, bx.PartialCredentialsError, bx.ProfileNotFound) as error:
            raise StorageError(f"access refused ({_short(error)})", where=where,
                               mend="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a role that may read "
                                    "and write this bucket; `tidewheel doctor --storage URI` tests it") from None
        except (bx.EndpointConnectionError, bx.ConnectTimeoutError, bx.ProxyConnectionError) as error:
            raise StorageAwayError(
                f"the object store does not answer ({_short(error)})", where=where,
                mend="check AWS_ENDPOINT_URL and that the server is up") from None
        except bx.ParamValidationError:
            raise StorageError(f"{self.bucket!r} is not a possible bucket name", where=where,
                               mend="3 to 63 small letters, digits, dots and dashes") from None
        except (OSError, bx.BotoCoreError, bx.ClientError, aiohttp.ClientError, ValueError) as error:
            raise StorageAwayError(
                f"the object store failed ({_short(error)})", where=where,
                mend="try again; if it persists, check AWS_ENDPOINT_URL and the store's health") from error

    def _require_bucket(self) -> None:
        """StorageError when the bucket itself is missing; asked once a process and bucket."""
        place = (os.environ.get("AWS_ENDPOINT_URL", ""), self.bucket)
        if place in _buckets_seen:
            return
        try:
            _patiently(lambda: self.fs.call_s3("head_bucket", Bucket=self.bucket))
        except FileNotFoundError:
            raise StorageError(f"there is no bucket {self.bucket!r}", where=self.uri,
                               mend="create the bucket or correct the URI; AWS_ENDPOINT_URL chooses the server"
                               ) from None
        except PermissionError:
            return  # may read the objects but not ask about the bucket: then it exists
        _buckets_seen.add(place)


class _Reader(io.RawIOBase):
    """An object as a seekable stream of ranged reads; io.BufferedReader around it reads ahead."""

    def __init__(self, store: S3Store, key: str, size: int) -> None:
        self._store, self._key, self._size, self._at = store, key, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"cannot seek to {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        data = self._take(view.nbytes)
        view[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        return self._take(self._size)

    def _take(self, length: int) -> bytes:
        end = min(self._size, self._at + length)
        if self._at >= end:
            return b""
        data = self._store.read(self._key, self._at, end - self._at)
        if len(data) != end - self._at:
            raise StorageError(f"{len(data)} bytes came where {end - self._at} should be",
                               where=self._store.at(self._key), mend="the object changed while it was read: try again")
        self._at += len(data)
        return data


class _Upload:
    """Collects what is written; sends it as one object at `finish`, or in parts when it is long."""

    def __init__(self, store: S3Store, key: str) -> None:
        self._store, self._key = store, safe_key(key)
        self._buffer = bytearray()
        self._id = ""
        self._parts: list[dict[str, Any]] = []
        self._sent = 0

    def write(self, data: Any, /) -> int:
        view = memoryview(data)
        for begin in range(0, view.nbytes, PART_BYTES):
            self._buffer += view[begin:begin + PART_BYTES]
            if len(self._buffer) >= PART_BYTES:
                self._send_part()
        return view.nbytes

    def finish(self) -> None:
        """Publish. Until this returns there is nothing under the key, or what was there before."""
        if not self._id:
            with self._store._explained(self._key):
                self._store.call("put_object", self._key, Body=bytes(self._buffer))
            return
        if self._buffer:
            self._send_part()
        with self._store._explained(self._key):
            try:
                self._store.call("complete_multipart_upload", self._key, UploadId=self._id,
                                 MultipartUpload={"Parts": self._parts})
            except OSError as error:
                if _code(error) != "NoSuchUpload" or self._store.size(self._key) != self._sent:
                    raise  # else an earlier attempt completed it, and only its answer was lost

    def abort(self) -> None:
        """Leave nothing behind. Best effort: the error on its way is the one to tell."""
        if self._id:
            with contextlib.suppress(Exception):
                self._store.call("abort_multipart_upload", self._key, UploadId=self._id)

    def _send_part(self) -> None:
        with self._store._explained(self._key):
            if not self._id:
                self._id = self._store.call("create_multipart_upload", self._key)["UploadId"]
            number = len(self._parts) + 1
            answer = self._store.call("upload_part", self._key, UploadId=self._id, PartNumber=number,
                                      Body=bytes(self._buffer))
        self._parts.append({"PartNumber": number, "ETag": answer["ETag"]})
        self._sent += len(self._buffer)
        self._buffer.clear()


def _patiently(call: Callable[[], T]) -> T:
    """`call()`, tried again while the store has a bad day."""
    for attempt in range(ATTEMPTS - 1):
        try:
            return call()
        except Exception as error:
            if not _transient(error):
                raise
            time.sleep(random.random() * min(WAIT_AT_MOST, WAIT_SECONDS * 2 ** attempt))
    return call()


def _transient(error: BaseException) -> bool:
    """Worth another try. A server that cannot be reached at all is not: that is told at once."""
    import aiohttp
    import botocore.exceptions as bx

    if isinstance(error, bx.EndpointConnectionError | bx.ConnectTimeoutError | bx.ProxyConnectionError):
        return False
    lost = (bx.HTTPClientError, bx.IncompleteReadError, bx.ResponseStreamingError, aiohttp.ClientPayloadError,
            aiohttp.ServerDisconnectedError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
    return isinstance(error, lost) or isinstance(error.__cause__, lost) or _code(error) in TRANSIENT_CODES


def _code(error: BaseException) -> str:
    """The protocol's error code behind an error of the client, such as "NoSuchKey"."""
    response = getattr(error.__cause__ or error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


@lru_cache(maxsize=8)
def _s3_filesystem(pid: int, identity: str) -> Any:
    """One client per process and identity (a hash of the environment's): s3fs clients do not survive a fork."""
    import s3fs

    client = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True,
                               config_kwargs={"connect_timeout": 5, "read_timeout": 30,
                                              "retries": {"max_attempts": 3, "mode": "standard"}})
    client.retries = 3  # of throttled and timed-out calls, each with botocore's three attempts in it
    return client
