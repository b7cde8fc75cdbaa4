"""Requests of the S3 protocol, each with a deadline of its own, tried again within one budget.

The client underneath (s3fs, aiobotocore, aiohttp) tries once, and its own time limits do not cover every wait: for a
store's `100 Continue` it waits for ever. So each request is a coroutine on s3fs's loop that is cancelled at its
deadline. Every request may be repeated: an object's content is the same whoever wrote it, and a completed upload that
is completed again is recognised.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import os
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from tidewheel import s3_problems, time_limit
from tidewheel.errors import StorageError
from tidewheel.s3_problems import Kind, SilentError

ENDPOINT = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
IDENTITY = (*ENDPOINT, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION")
FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
"""Variables that name the files of the identity, and where they are otherwise."""
CONNECT_SECONDS = 5.0
SESSION_SECONDS = 30.0
"""For a new client to load its tables and find credentials, once a process and identity."""
LOOP_SECONDS = 30.0
"""The loop of the client may be this late, on a busy machine, before it is taken for hung."""
CONNECTIONS = 64
CHUNK_BYTES = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """How long the store may take, and for how long a failing request is tried again."""

    request_seconds: float = 10.0
    """A request that moves no data is answered within this time, or cancelled and tried again."""
    least_bytes_per_second: float = 256 << 10
    """A request that moves data gets more time, at this throughput. A download is held to it while it runs."""
    budget_seconds: float = 30.0
    """No try of a call begins later, besides the time that its data takes at the least throughput."""
    pause_seconds: float = 0.2
    """Pauses between tries are random up to 0.2, 0.4, 0.8 ... seconds ("full jitter", M. Brooker, AWS Architecture
    Blog, 2015)."""
    longest_pause_seconds: float = 8.0

    def transfer_seconds(self, nbytes: int) -> float:
        """What `nbytes` take at the least throughput."""
        return nbytes / self.least_bytes_per_second


POLICY = RetryPolicy()
"""Of every store that is not given another."""


class Transfer:
    """One try of a request: the client, and the deadline, which moves on while a download makes progress."""

    def __init__(self, client: Any, policy: RetryPolicy) -> None:
        self.client, self._policy = client, policy
        self.received = 0
        self._begun = 0.0
        self._timeout: asyncio.Timeout | None = None

    async def run(self, work: Callable[[Transfer], Awaitable[T]], seconds: float) -> T:
        """The result of `work`; SilentError when it is not there in time."""
        try:
            async with asyncio.timeout(SESSION_SECONDS):
                await self.client.set_session()
        except TimeoutError as error:
            raise SilentError(f"no credentials within {SESSION_SECONDS:g} s") from error
        self._begun = asyncio.get_running_loop().time()
        self._timeout = timeout = asyncio.timeout(seconds)
        try:
            async with timeout:
                return await work(self)
        except TimeoutError as error:
            if not timeout.expired():
                raise
            seconds = asyncio.get_running_loop().time() - self._begun
            came = f"{self.received} bytes" if self.received else "no answer"
            raise SilentError(f"{came} within {seconds:.0f} s") from error

    async def body(self, answer: dict[str, Any]) -> bytes:
        """The content that comes with an answer, which must keep up the least throughput."""
        assert self._timeout is not None
        data = bytearray()
        try:
            while chunk := await answer["Body"].read(CHUNK_BYTES):
                data += chunk
                self.received = len(data)
                seconds = self._policy.request_seconds + self._policy.transfer_seconds(len(data))
                self._timeout.reschedule(self._begun + seconds)
        finally:
            answer["Body"].close()
        return bytes(data)


Work = Callable[[Transfer], Awaitable[T]]


def send(work: Work[T], policy: RetryPolicy, *, nbytes: int = 0, extra_seconds: float = 0.0) -> T:
    """What `work` returns, tried again while that can help and the budget lasts.

    Args:
        work: one request; called again for each try.
        nbytes: bytes that the request sends.
        extra_seconds: what the store needs for it beyond that.

    Raises:
        StorageAwayError: the thread's time limit has passed, see `time_limit`.
        Exception: what the client raised last, with a note about the tries.
    """
    limit = time_limit.current()
    began = time.monotonic()
    allowed = policy.transfer_seconds(nbytes) + extra_seconds
    budget = policy.budget_seconds + allowed
    tries = 0
    while True:
        limit.check()
        transfer = Transfer(filesystem(), policy)
        tries += 1
        try:
            result = _wait(transfer, work, policy.request_seconds + allowed)
            _reached.add(_endpoint())
            return result
        except Exception as error:
            if not _may_help(error, transfer):
                raise
            budget = max(budget, policy.budget_seconds + allowed + policy.transfer_seconds(transfer.received))
            pause = random.random() * min(policy.longest_pause_seconds, policy.pause_seconds * 2 ** min(tries - 1, 16))
            spent = time.monotonic() - began
            if spent + pause >= budget:
                if tries > 1:
                    error.add_note(f"{tries} tries in {spent:.0f} s")
                raise
        limit.pause(pause)


def _may_help(error: Exception, transfer: Transfer) -> bool:
    """Whether another try may end better."""
    if s3_problems.answered(error):
        _reached.add(_endpoint())
    match s3_problems.kind(error):
        case Kind.UNREACHABLE:  # if it never was reached, the address is more likely wrong than the server down
            return _endpoint() in _reached
        case Kind.EXPIRED:
            _forget(transfer.client)
            return True
        case Kind.TRANSIENT:
            return True
    return False


def _wait(transfer: Transfer, work: Work[T], seconds: float) -> T:
    """One try, run on the client's loop while this thread waits."""
    limit = time_limit.current()
    seconds = min(seconds, limit.left)
    future = asyncio.run_coroutine_threadsafe(transfer.run(work, seconds), transfer.client.loop)
    try:
        with limit.watched(future.cancel):
            return future.result(timeout=SESSION_SECONDS + seconds + LOOP_SECONDS)
    except concurrent.futures.CancelledError:
        limit.check()
        raise SilentError("the request was cancelled") from None
    except TimeoutError as error:
        limit.check()
        if future.done():  # the store's own, or that of `Transfer`
            raise
        raise SilentError("the client hangs") from error
    finally:
        future.cancel()


# -- clients -----------------------------------------------------------------------------------
_reached: set[str] = set()
"""Endpoints that have answered this process."""
_renewals = 0


def filesystem() -> Any:
    """The s3fs client of this process for the identity and endpoint now in the environment and its files.

    Raises:
        StorageError: the endpoint has a password in it.
    """
    for name in ENDPOINT:
        if "@" in os.environ.get(name, ""):  # not shown: it would be in the log
            raise StorageError("the endpoint holds a user or a password, which S3 clients do not use", where=name,
                               mend=f"remove everything up to the @ from {name}, and give the key with "
                               "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    names = [os.environ.get(name, "") for name in IDENTITY]
    for name, default in FILES.items():
        path = Path(os.environ.get(name) or default).expanduser()
        stamp = None
        with contextlib.suppress(OSError):
            stamp = path.stat()
        names.append(f"{path} {stamp.st_mtime_ns} {stamp.st_size}" if stamp else str(path))
    identity = hashlib.sha256("\0".join(names).encode()).hexdigest()
    return _filesystem(os.getpid(), identity, _renewals)


def _forget(client: Any) -> None:
    """Have the next try make a new client, which looks for credentials anew."""
    global _renewals
    if client is filesystem():  # else another thread has done so
        _renewals += 1


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")


@lru_cache(maxsize=8)
def _filesystem(pid: int, identity: str, renewals: int) -> Any:
    """One client per process and identity (a hash of the environment's): s3fs clients do not survive a fork."""
    import s3fs

    client = s3fs.S3FileSystem(
        use_listings_cache=False, skip_instance_cache=True,
        config_kwargs={"connect_timeout": CONNECT_SECONDS, "read_timeout": 3600,  # `Transfer` has the say
                       "max_pool_connections": CONNECTIONS, "retries": {"total_max_attempts": 1, "mode": "standard"}})
    client.retries = 1  # `send` tries again, and nobody else
    return client
