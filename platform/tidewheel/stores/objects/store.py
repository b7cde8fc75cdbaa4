"""A prefix of a bucket as a `Store`, whatever the protocol.

Objects are written whole: in one request when small, else as an upload in parts that is completed at the end or
aborted. Nothing is visible under a key before that, and nothing is ever renamed.

Temporary failures of a store (500, 503 SlowDown, a reset connection, silence, a body that ends early) are retried for
about half a minute, see `tidewheel.retry`.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeVar, cast

from tidewheel import retry
from tidewheel.errors import StorageError, TidewheelError
from tidewheel.retry import RetryPolicy
from tidewheel.storage import CHUNK_BYTES, HashingWriter, Stamp, Store, Upload, Writer, join, safe_key
from tidewheel.stores.objects.requests import Transfer, identity_of, send
from tidewheel.stores.objects.service import Entry, Problem, Service
from tidewheel.stores.objects.streams import Reader, Sender

READ_BYTES = 64 << 20
"""A longer range is read in several requests, so that a broken connection costs only one of them."""
DELETE_THREADS = 16
T = TypeVar("T")
_buckets_seen: set[tuple[str, str]] = set()
"""Identities of stores whose buckets exist, see `ObjectStore.identity`."""


class ObjectStore(Store):
    """A prefix of a bucket. Endpoint and credentials come from the environment. Safe to use from several threads.

    Args:
        uri: scheme://bucket/prefix.
        policy: deadlines and retries of its requests; default: `retry.POLICY`.
    """

    service_type: ClassVar[type[Service]]

    def __init__(self, uri: str, policy: RetryPolicy | None = None) -> None:
        super().__init__(uri)
        self._policy = policy
        self.bucket, _, self.prefix = uri.partition("://")[2].partition("/")
        self.service = self.service_type(self.bucket)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.uri, self._policy))

    def child(self, *parts: str) -> Store:
        return type(self)(join(self.uri, *(safe_key(part) for part in parts)), self._policy)

    @property
    def policy(self) -> RetryPolicy:
        """Deadlines and retries of a request."""
        return self._policy or retry.POLICY

    def identity(self) -> str:
        return f"{self.service.scheme}://{self.bucket} {identity_of(self.service_type)}"

    def name(self, key: str) -> str:
        """Return `key` with the prefix: the name of the object in its bucket."""
        return f"{self.prefix}/{safe_key(key)}" if self.prefix else safe_key(key)

    def ask(self, operation: str, *arguments: Any, nbytes: int = 0, extra_seconds: float = 0.0,
            policy: RetryPolicy | None = None, **options: Any) -> Any:
        """Return the answer to one request, retried by the policy.

        Args:
            operation: method of the service: "head", "put" ...
            arguments: the method's arguments.
            nbytes: bytes that the request sends.
            extra_seconds: what the store needs beyond the time for these.
            policy: another policy than the store's.
            options: the method's keyword arguments.
        """
        method: Callable[..., Awaitable[Any]] = getattr(self.service, operation)

        async def work(transfer: Transfer) -> Any:
            return await method(transfer, *arguments, **options)

        return send(self.service, work, policy or self.policy, nbytes=nbytes, extra_seconds=extra_seconds)

    # -- reading -------------------------------------------------------------------------------
    def open(self, key: str) -> BinaryIO:
        size = self.size(key)
        return cast(BinaryIO, io.BufferedReader(Reader(self, key, size), CHUNK_BYTES))

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            self.size(key)  # a missing object is missing here too
            return b""
        with self.explained(key):
            if length is None or length <= READ_BYTES:
                return self._range(key, start, length)
            data = bytearray()
            while len(data) < length:
                requested = min(READ_BYTES, length - len(data))
                piece = self._range(key, start + len(data), requested)
                data += piece
                if len(piece) < requested:  # the object ends here
                    break
            return bytes(data)

    def _range(self, key: str, start: int, length: int | None) -> bytes:
        """Return bytes [start, start + length) by one request."""
        try:
            return cast(bytes, self.ask("get", self.name(key), start, length))
        except self.service.errors() as error:
            if self.service.problem(error) is Problem.BEYOND:
                return b""
            raise

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except FileNotFoundError:
            return False
        return True

    def size(self, key: str) -> int:
        return self._head(key).bytes

    def written_at(self, key: str) -> float:
        return self._head(key).written

    def fingerprint(self, key: str) -> str:
        entry = self._head(key)
        return f"etag-{entry.bytes}-{entry.tag}"

    def _head(self, key: str) -> Entry:
        with self.explained(key):
            return cast(Entry, self.ask("head", self.name(key)))

    def local_path(self, key: str) -> Path | None:
        return None

    # -- writing -------------------------------------------------------------------------------
    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[Writer]:
        sender = Sender(self, key)
        hashing = HashingWriter(key, sender)
        try:
            yield hashing
            sender.finish()
        except BaseException:
            sender.abort()
            raise

    def create(self, key: str, data: bytes) -> bool:
        with self.explained(key):
            try:
                self.ask("put", self.name(key), data, create=True, nbytes=len(data))
            except self.service.errors() as error:
                if self.service.problem(error) is not Problem.EXISTS:
                    raise
                return self.read(key) == data  # an earlier try may have made it, and only its answer was lost
        return True

    def delete(self, key: str) -> None:
        with self.explained(key):
            self._delete(self.name(key))

    def _delete(self, name: str) -> None:
        try:
            self.ask("delete", name)
        except self.service.errors() as error:
            if self.service.problem(error) is not Problem.MISSING:
                raise
            self._require_bucket()

    def delete_tree(self, prefix: str) -> None:
        names = [self.name(entry.key) for entry in self.list(safe_key(prefix))]
        batch = self.service.delete_batch
        with self.explained(prefix):
            if not batch:
                with ThreadPoolExecutor(DELETE_THREADS) as pool:
                    list(pool.map(self._delete, names))
                return
            for begin in range(0, len(names), batch):
                refused = self.ask("delete_many", names[begin:begin + batch])
                if refused:
                    raise StorageError(f"{len(refused)} objects cannot be deleted ({refused[0]})",
                                       where=join(self.uri, prefix), fix="allow s3:DeleteObject on this bucket")

    # -- listings ------------------------------------------------------------------------------
    def list(self, prefix: str = "") -> Sequence[Stamp]:
        return self._list(prefix, "")

    def list_named(self, folder: str, beginning: str) -> Sequence[Stamp]:
        return self._list(folder, beginning)

    def _list(self, folder: str, beginning: str) -> Sequence[Stamp]:
        skipped = len(self.prefix) + 1 if self.prefix else 0
        entries = self._pages("list_page", folder, beginning)
        stamps = [Stamp(entry.name[skipped:], entry.bytes, "") for entry in entries if not entry.name.endswith("/")]
        return sorted(stamps, key=lambda stamp: stamp.key)

    def uploads(self, prefix: str = "") -> Sequence[Upload]:
        skipped = len(self.prefix) + 1 if self.prefix else 0
        uploads = self._pages("uploads_page", prefix, "")
        return [Upload(entry.name[skipped:], upload, entry.written) for entry, upload in uploads]

    def _pages(self, operation: str, folder: str, beginning: str) -> Sequence[Any]:
        """Return the entries of all pages of a listing below `folder`, of names that begin with `beginning`."""
        top = self.name(folder) if folder else self.prefix
        entries: list[Any] = []
        after: Any = None
        with self.explained(folder):
            while True:
                page, after = self.ask(operation, (f"{top}/" if top else "") + beginning, after)
                entries += page
                if after is None:
                    return entries

    def abort(self, upload: Upload) -> None:
        with self.explained(upload.key), contextlib.suppress(FileNotFoundError):
            try:
                self.ask("abort", upload.id, self.name(upload.key))
            except self.service.errors() as error:
                if self.service.problem(error) is not Problem.NO_UPLOAD:
                    raise

    def check(self) -> None:
        with self.explained():
            self.ask("check")

    # -- errors --------------------------------------------------------------------------------
    @contextlib.contextmanager
    def explained(self, key: str = "") -> Iterator[None]:
        """Turn the client's errors into ours.

        Raises:
            FileNotFoundError: there is no such object.
            StorageError: anything else that went wrong.
        """
        where = join(self.uri, key)
        try:
            yield
        except TidewheelError:
            raise
        except self.service.errors() as error:
            if isinstance(error, FileNotFoundError) or self.service.problem(error) is Problem.MISSING:
                self._require_bucket()
                raise FileNotFoundError(where) from None
            raise self.service.explained(error, where) from error

    def _require_bucket(self) -> None:
        """Raise StorageError when the bucket itself is missing; ask once per process and bucket."""
        bucket = (self.service.scheme, self.identity())
        if bucket in _buckets_seen:
            return

        try:
            self.ask("head_bucket")
        except PermissionError:
            return  # may read the objects but not ask about the bucket: then it exists
        except self.service.errors() as error:
            if isinstance(error, FileNotFoundError) or self.service.problem(error) is Problem.MISSING:
                raise self.service.no_bucket(self.uri) from None
            raise
        _buckets_seen.add(bucket)
