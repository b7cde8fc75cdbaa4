"""Threads that nobody has to wait for: work that may hang in storage must not hold up the end of what asked for it."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tidewheel.time_limit import TimeLimit

T = TypeVar("T")


class DaemonThread:
    """Runs calls one after the other, as `ThreadPoolExecutor(1)` does, in a thread that can be left behind.

    An executor's thread is joined when the process ends, whatever it hangs in; this one is not.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run `function(*arguments)` behind what was submitted before."""
        if self._stopped:
            raise RuntimeError(f"the thread {self._name!r} was told to stop")
        future: Future[T] = Future()
        self._calls.put((future, lambda: function(*arguments)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return future

    def stop(self, *, wait: bool = True) -> None:
        """Cancel what has not begun, and end the thread; more than once does no harm.

        Args:
            wait: return once the call under way, if any, is done. Otherwise it is left to end by itself.
        """
        self._stopped = True
        self._calls.put(None)
        if wait and self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if self._stopped:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # whoever waits for the result gets it
                future.set_exception(error)
            del call, future, function  # they hold what they were called with


def result(future: Future[T], limit: TimeLimit) -> T:
    """Return the result of `future`, waiting for it no longer than `limit` allows.

    Raises:
        StorageAwayError: the limit has passed before it was there.
    """
    woken = threading.Event()
    future.add_done_callback(lambda _: woken.set())
    with limit.watched(woken.set):
        woken.wait(None if math.isinf(limit.left) else limit.left)
    if not future.done():
        limit.check()
    return future.result()
