"""Stores in S3-protocol object stores (AWS, MinIO, Ceph, R2, moto), over s3fs's client.

Objects are written whole: one PUT when small, else a multipart upload that is completed at the end or
aborted. Nothing is visible under a key before that, and nothing is ever renamed.

What a store does on a bad day (500, 503 SlowDown, a reset connection, silence, a body that ends early) is tried again
for about half a minute, see `s3_requests`.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from tidewheel import s3_problems, s3_requests
from tidewheel.errors import StorageError
from tidewheel.s3_requests import RetryPolicy, Transfer, send
from tidewheel.storage import CHUNK_BYTES, HashingWriter, Stamp, Store, Upload, Writer, join, safe_key

PART_BYTES = 16 << 20  # of a multipart upload: 10,000 parts at most, so objects up to 160 GiB
READ_BYTES = 64 << 20
"""A longer range is read in several requests: what breaks off is read again from there."""
DELETE_BATCH = 1000  # the protocol's limit for one DeleteObjects call
PART_SECONDS = 0.5
"""The completion of an upload gets this much time for each part: stores take minutes for thousands."""
_buckets_seen: set[tuple[str, str]] = set()


class S3Store(Store):
    """A prefix of a bucket. Credentials and endpoint come from the environment (AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL) or the machine's role. Safe to use from several threads.

    Args:
        uri: s3://bucket/prefix.
        policy: deadlines and tries of its requests; default: `s3_requests.POLICY`.
    """

    def __init__(self, uri: str, policy: RetryPolicy | None = None) -> None:
        super().__init__(uri)
        self._policy = policy
        self.path = uri.removeprefix("s3://")
        self.bucket, _, self.prefix = self.path.partition("/")

    def __reduce__(self) -> tuple[Any, ...]:
        return (S3Store, (self.uri, self._policy))

    def child(self, *parts: str) -> Store:
        return S3Store(join(self.uri, *(safe_key(part) for part in parts)), self._policy)

    @property
    def policy(self) -> RetryPolicy:
        """Deadlines and tries of a request."""
        return self._policy or s3_requests.POLICY

    def _name(self, key: str) -> str:
        """`key` with the prefix: the name of the object in its bucket."""
        return f"{self.path}/{safe_key(key)}".partition("/")[2]

    def call(self, method: str, key: str, *, extra_seconds: float = 0.0, **arguments: Any) -> Any:
        """One request of the S3 protocol about `key`, for example call("head_object", "a/b")."""
        return self._ask(method, extra_seconds, Key=self._name(key), **arguments)

    def _ask(self, method: str, extra_seconds: float = 0.0, **arguments: Any) -> Any:
        """One request of the S3 protocol about the bucket."""
        async def work(transfer: Transfer) -> Any:
            client = transfer.client
            try:
                return await client._call_s3(method, Bucket=self.bucket, **arguments)
            except OSError as error:
                if s3_problems.code(error) not in s3_problems.MUTE_CODES or not method.startswith("head_"):
                    raise
            # the answer to a HEAD has no body that says why: ask in another way, and if that is allowed, as before
            await client._call_s3("list_objects_v2", Bucket=self.bucket, MaxKeys=1)
            return await client._call_s3(method, Bucket=self.bucket, **arguments)

        return send(work, self.policy, nbytes=len(arguments.get("Body", b"")), extra_seconds=extra_seconds)

    def open(self, key: str) -> BinaryIO:
        size = self.size(key)
        return cast(BinaryIO, io.BufferedReader(_Reader(self, key, size), CHUNK_BYTES))

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            self.size(key)  # a missing object is missing here too
            return b""
        with self._explained(key):
            if length is None or length <= READ_BYTES:
                return self._range(key, start, length)
            data = bytearray()
            while len(data) < length:
                wanted = min(READ_BYTES, length - len(data))
                piece = self._range(key, start + len(data), wanted)
                data += piece
                if len(piece) < wanted:  # the object ends here
                    break
            return bytes(data)

    def _range(self, key: str, start: int, length: int | None) -> bytes:
        """Bytes [start, start + length) by one request."""
        name = self._name(key)
        wanted: dict[str, Any] = {}
        if start or length is not None:
            wanted["Range"] = f"bytes={start}-" if length is None else f"bytes={start}-{start + length - 1}"

        async def work(transfer: Transfer) -> bytes:
            answer = await transfer.client._call_s3("get_object", Bucket=self.bucket, Key=name, **wanted)
            return await transfer.body(answer)

        try:
            return send(work, self.policy)
        except OSError as error:
            if s3_problems.code(error) == "InvalidRange":  # begins at or behind the end
                return b""
            raise

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[Writer]:
        upload = _Sender(self, key)
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
                if s3_problems.code(error) not in ("PreconditionFailed", "412"):
                    raise
                # a try of ours may have made it, of which only the answer was lost; aiohttp, too, sends a PUT again
                return self.read(key) == data
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
        return self._list(prefix, "")

    def list_named(self, folder: str, beginning: str) -> Sequence[Stamp]:
        return self._list(folder, beginning)

    def _list(self, prefix: str, beginning: str) -> Sequence[Stamp]:
        top = self._name(prefix) if prefix else self.prefix
        cut = len(self.prefix) + 1 if self.prefix else 0
        page: dict[str, Any] = {}
        found: list[Stamp] = []
        with self._explained(prefix):
            while True:
                page = self._ask("list_objects_v2", Prefix=(f"{top}/" if top else "") + beginning, **_continued(page))
                for entry in page.get("Contents", ()):
                    if not entry["Key"].endswith("/"):
                        found.append(Stamp(entry["Key"][cut:], int(entry["Size"]), ""))
                if not page.get("IsTruncated"):
                    break
        return sorted(found, key=lambda entry: entry.key)

    def delete(self, key: str) -> None:
        with self._explained(key):
            self.call("delete_object", key)

    def delete_tree(self, prefix: str) -> None:
        names = [self._name(entry.key) for entry in self.list(safe_key(prefix))]
        for begin in range(0, len(names), DELETE_BATCH):
            batch = {"Objects": [{"Key": name} for name in names[begin:begin + DELETE_BATCH]], "Quiet": True}
            with self._explained(prefix):
                refused = self._ask("delete_objects", Delete=batch).get("Errors")
            if refused:
                raise StorageError(f"{len(refused)} objects cannot be deleted ({refused[0].get('Code')})",
                                   where=join(self.uri, prefix), mend="allow s3:DeleteObject on this bucket")

    def written_at(self, key: str) -> float:
        with self._explained(key):
            return float(self.call("head_object", key)["LastModified"].timestamp())

    def uploads(self, prefix: str = "") -> Sequence[Upload]:
        top = self._name(prefix) if prefix else self.prefix
        cut = len(self.prefix) + 1 if self.prefix else 0
        found: list[Upload] = []
        after: dict[str, Any] = {}
        with self._explained(prefix):
            while True:
                page = self._ask("list_multipart_uploads", Prefix=f"{top}/" if top else "", **after)
                for entry in page.get("Uploads", ()):
                    found.append(Upload(entry["Key"][cut:], entry["UploadId"], entry["Initiated"].timestamp()))
                if not page.get("IsTruncated"):
                    return found
                after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def abort(self, upload: Upload) -> None:
        with self._explained(upload.key), contextlib.suppress(FileNotFoundError):
            self.call("abort_multipart_upload", upload.key, UploadId=upload.id)

    def local_path(self, key: str) -> Path | None:
        return None

    def fingerprint(self, key: str) -> str:
        with self._explained(key):
            info = self.call("head_object", key)
        return f"etag-{info['ContentLength']}-{str(info.get('ETag', '')).strip(chr(34))}"

    def check(self) -> None:
        with self._explained():
            self._ask("list_objects_v2", MaxKeys=1)

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
        except (OSError, bx.BotoCoreError, bx.ClientError, aiohttp.ClientError, ValueError) as error:
            raise s3_problems.explained(error, where, self.bucket) from error

    def _require_bucket(self) -> None:
        """StorageError when the bucket itself is missing; asked once a process and bucket."""
        place = (os.environ.get("AWS_ENDPOINT_URL", ""), self.bucket)
        if place in _buckets_seen:
            return
        try:
            self._ask("head_bucket")
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


class _Sender:
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
                                 extra_seconds=PART_SECONDS * len(self._parts), MultipartUpload={"Parts": self._parts})
            except OSError as error:
                if s3_problems.code(error) != "NoSuchUpload" or self._store.size(self._key) != self._sent:
                    raise  # else an earlier attempt completed it, and only its answer was lost

    def abort(self) -> None:
        """Leave nothing behind. Best effort, by one try: the error on its way is the one to tell, and `Store.uploads`
        finds what is left."""
        if self._id:
            once = replace(self._store.policy, budget_seconds=self._store.policy.request_seconds)
            with contextlib.suppress(Exception):
                S3Store(self._store.uri, once).call("abort_multipart_upload", self._key, UploadId=self._id)

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


def _continued(page: dict[str, Any]) -> dict[str, Any]:
    """What asks for the page of a listing behind `page`."""
    token = page.get("NextContinuationToken")
    return {"ContinuationToken": token} if token else {}
