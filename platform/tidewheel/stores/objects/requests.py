"""Requests to object stores, each with a deadline of its own, retried within one budget.

The clients underneath try once, and their own time-outs do not cover every wait: for a store's `100 Continue` they wait
for ever. So each request is a coroutine on fsspec's loop that is cancelled at its deadline. Every request may be
repeated: an object's content is the same whoever wrote it, and completing an upload twice is recognised.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from tidewheel import retry, time_limit
from tidewheel.retry import RetryPolicy
from tidewheel.stores.objects.service import Problem, Service, SilentError

logger = logging.getLogger(__name__)
SESSION_SECONDS = 30.0
"""Deadline for a new client to load its tables and find credentials, once per process and identity."""
LOOP_SECONDS = 30.0
"""The client's loop may be this late on a busy machine before it counts as hung."""
T = TypeVar("T")


@dataclass(frozen=True)
class Connection:
    """A client, and the identity that it was made for.

    Args:
        client: an fsspec file system.
        endpoint: address or account.
        identity: hash of endpoint and credentials.
    """

    client: Any
    endpoint: str
    identity: str


class Transfer:
    """One try of a request: its client, and its deadline, which moves while a download makes progress.

    Args:
        connection: connection whose client sends the request.
        policy: deadlines of requests.
        tries: number of this try, counted from 1.
    """

    def __init__(self, connection: Connection, policy: RetryPolicy, tries: int = 1) -> None:
        self.connection = connection
        self.client = connection.client
        self.tries = tries
        """Number of this try, from 1 on."""
        self.received = 0
        """Bytes of a download so far."""
        self._policy = policy
        self._began = 0.0
        self._timeout: asyncio.Timeout | None = None

    async def run(self, service: Service, work: Callable[[Transfer], Awaitable[T]], seconds: float) -> T:
        """Return the result of `work`.

        Args:
            service: prepares the client.
            work: the request.
            seconds: the request's deadline.

        Raises:
            SilentError: the result did not come in time.
        """
        try:
            async with asyncio.timeout(SESSION_SECONDS):
                await service.prepare(self.client)
        except TimeoutError as error:
            raise SilentError(f"no credentials within {SESSION_SECONDS:g} s") from error
        self._began = asyncio.get_running_loop().time()
        self._timeout = timeout = asyncio.timeout(seconds)
        try:
            async with timeout:
                return await work(self)
        except TimeoutError as error:
            if not timeout.expired():
                raise
            seconds = asyncio.get_running_loop().time() - self._began
            progress = f"{self.received} bytes" if self.received else "no answer"
            raise SilentError(f"{progress} within {seconds:.0f} s") from error

    async def body(self, chunks: AsyncIterator[bytes]) -> bytes:
        """Return a download's content; it must keep up the least throughput."""
        assert self._timeout is not None
        data = bytearray()
        async for chunk in chunks:
            data += chunk
            self.received = len(data)
            seconds = self._policy.request_seconds + self._policy.transfer_seconds(len(data))
            self._timeout.reschedule(self._began + seconds)
        return bytes(data)


Work = Callable[[Transfer], Awaitable[T]]


def send(service: Service, work: Work[T], policy: RetryPolicy, *, nbytes: int = 0, extra_seconds: float = 0.0) -> T:
    """Return the result of `work`, tried again while that may help and the budget lasts.

    Args:
        service: sends the request and knows its errors.
        work: one request; called again for each try.
        policy: deadline and budget.
        nbytes: bytes that the request sends.
        extra_seconds: what the store needs for it beyond that.

    Raises:
        StorageAwayError: the thread's time limit has passed, see `time_limit`.
        Exception: the error of the last try, with a note about the number of tries.
    """
    allowed = policy.transfer_seconds(nbytes) + extra_seconds
    outlasts = retry.is_nested()
    transfers: list[Transfer] = []

    def attempt() -> T:
        transfers.append(Transfer(connection(type(service)), policy, len(transfers) + 1))
        result = _wait(transfers[-1], service, work, policy.request_seconds + allowed)
        _reached.add(transfers[-1].connection.endpoint)
        return result

    def may_help(error: Exception) -> bool:
        return bool(transfers) and _may_help(error, service, transfers[-1].connection, outlasts)

    def extra() -> float:
        return allowed + policy.transfer_seconds(max(transfer.received for transfer in transfers))

    return retry.call(attempt, policy, may_help=may_help, extra_seconds=extra)


def _may_help(error: Exception, service: Service, used: Connection, outlasts: bool) -> bool:
    """Return whether another try may end better."""
    if service.was_answered(error):
        _reached.add(used.endpoint)
    match service.problem(error):
        case Problem.UNREACHABLE:  # an endpoint that never answered is more likely a wrong address than a server down
            return outlasts or used.endpoint in _reached
        case Problem.EXPIRED:
            _renew(service, used)
            return True
        case Problem.TRANSIENT:
            return True
    return False


def _wait(transfer: Transfer, service: Service, work: Work[T], seconds: float) -> T:
    """Run one try on the client's loop while this thread waits."""
    limit = time_limit.current()
    seconds = min(seconds, limit.left)
    future = asyncio.run_coroutine_threadsafe(transfer.run(service, work, seconds), transfer.client.loop)
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
_renewals: dict[type[Service], int] = {}


def connection(service: type[Service]) -> Connection:
    """Return this process's connection for the endpoint and credentials that the environment and its files now name.

    Raises:
        StorageError: a package is missing, or the environment is incomplete.
    """
    endpoint = service.endpoint()
    identity = identity_of(service)
    return Connection(_client(os.getpid(), service, identity, _renewals.get(service, 0)), endpoint, identity)


def identity_of(service: type[Service]) -> str:
    """Return the hash of a service's endpoint and credentials; it changes when the environment or its files do."""
    values = [f"{name}={os.environ.get(name, '')}" for name in service.environment]
    for name, default in service.files.items():
        path = Path(os.environ.get(name) or default).expanduser()
        values.append(str(path))
        with contextlib.suppress(OSError):
            status = path.stat()
            values.append(f"{status.st_mtime_ns} {status.st_size}")
    return hashlib.sha256("\0".join(values).encode()).hexdigest()


def _renew(service: Service, used: Connection) -> None:
    """Make the next try create a new client, which looks for credentials again."""
    kind = type(service)
    if connection(kind).client is used.client:  # else another thread has done so
        logger.info("the credentials for %s:// have expired: looking for new ones", kind.scheme)
        _renewals[kind] = _renewals.get(kind, 0) + 1


@lru_cache(maxsize=8)
def _client(pid: int, service: type[Service], identity: str, renewals: int) -> Any:
    """Return one client per process and identity: fsspec's clients do not survive a fork."""
    return service.connect()


def try_once(session: Any) -> None:
    """Have an aiohttp session not repeat a request by itself when a kept connection turns out to be closed."""
    if hasattr(session, "_retry_connection"):
        session._retry_connection = False
