"""Time limits for a thread's calls to storage, which another thread can bring forward.

    limit = TimeLimit(1800, "the save")
    bounded(lambda: store.write("key", data), limit)   # raises once the limit has passed
    limit.end("the generation has ended")              # from another thread: raises now

Stores check the limit of the calling thread: object stores before and during each request and pause, folders before
each chunk.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from tidewheel.daemon import start_daemon
from tidewheel.errors import StorageAwayError

GRACE_SECONDS = 2.0
"""After its limit, work has this long to stop by itself before its thread is abandoned."""
T = TypeVar("T")


class TimeLimit:
    """A limit that ends `seconds` from now, or at the first call of `end`. Safe to use from several threads.

    Args:
        seconds: from now on; infinity for no limit.
        what: names the work in errors, such as "the save".
    """

    def __init__(self, seconds: float = math.inf, what: str = "this") -> None:
        self._seconds, self._what = seconds, what
        self._until = time.monotonic() + seconds
        self._ended = threading.Event()
        self._reason = ""
        self._lock = threading.Lock()
        self._watchers: list[Callable[[], Any]] = []

    @property
    def left(self) -> float:
        """Seconds until the limit; 0 after it."""
        return 0.0 if self._ended.is_set() else max(0.0, self._until - time.monotonic())

    def end(self, reason: str) -> None:
        """Stop all work under this limit at once, because of `reason`."""
        with self._lock:
            if self._ended.is_set():
                return
            self._reason = reason
            self._ended.set()
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher()

    def check(self) -> None:
        """Check the limit.

        Raises:
            StorageAwayError: it has passed.
        """
        if self._ended.is_set():
            raise StorageAwayError(f"{self._what} was stopped: {self._reason}", where="storage",
                                   fix="nothing: it is repeated when it is due")
        if time.monotonic() >= self._until:
            raise StorageAwayError(f"{self._what} took longer than {self._seconds:g} s", where="storage",
                                   fix="check the store and its bandwidth, or allow more time")

    def pause(self, seconds: float) -> None:
        """Sleep, but not past the limit."""
        self._ended.wait(min(seconds, self.left))

    @contextlib.contextmanager
    def watched(self, watcher: Callable[[], Any]) -> Iterator[None]:
        """Call `watcher` when `end` is called during the block, or was called before."""
        with self._lock:
            ended = self._ended.is_set()
            self._watchers.append(watcher)
        if ended:
            watcher()
        try:
            yield
        finally:
            with self._lock:
                self._watchers.remove(watcher)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Apply this limit to the thread's calls to stores during the block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_NONE = TimeLimit()
_current: contextvars.ContextVar[TimeLimit] = contextvars.ContextVar("time limit", default=_NONE)


def current() -> TimeLimit:
    """Return the limit of this thread; by default one that never ends."""
    return _current.get()


def started(work: Callable[[], T], limit: TimeLimit, name: str) -> Future[T]:
    """Run `work` in a thread of its own under `limit`, and return its future.

    Args:
        work: to run.
        limit: of its calls to storage.
        name: of the thread.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            with limit.applied():
                limit.check()
                future.set_result(work())
        except BaseException as error:  # raised again by `Future.result`
            future.set_exception(error)

    start_daemon(run, name)
    return future


def bounded(work: Callable[[], T], limit: TimeLimit) -> T:
    """Return `work()`, run in a thread of its own under `limit`.

    A call into a file system that hangs cannot be stopped: its thread is abandoned after the limit.

    Raises:
        StorageAwayError: the limit has passed.
    """
    return result(started(work, limit, "bounded"), limit, grace_seconds=GRACE_SECONDS)


def result(future: Future[T], limit: TimeLimit, *, grace_seconds: float = 0.0) -> T:
    """Return the result of `future`, and wait for it until `limit` at most.

    Args:
        future: of work that may hang in storage.
        limit: how long to wait.
        grace_seconds: the work has this long to stop by itself after its limit.

    Raises:
        StorageAwayError: the limit passed without a result.
    """
    woken = threading.Event()
    future.add_done_callback(lambda _: woken.set())
    with limit.watched(woken.set):
        woken.wait(None if math.isinf(limit.left) else limit.left)
    wait([future], grace_seconds)
    if not future.done():
        limit.check()
        raise StorageAwayError("the storage does not answer", where="storage", fix="check the store")
    return future.result()
