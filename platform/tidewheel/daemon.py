"""Daemon threads for calls that may hang in storage and must not delay the exit of the process."""

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
    """Thread that runs calls in order, as `ThreadPoolExecutor(1)` does, and can be abandoned.

    Python joins an executor's thread when the process ends, even if it hangs; it does not join this one.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run `function(*arguments)` after earlier calls, and return its future.

        Raises:
            RuntimeError: `stop` was called.
        """
        if self._stopped:
            raise RuntimeError(f"the thread {self._name!r} has been stopped")
        future: Future[T] = Future()
        self._calls.put((future, lambda: function(*arguments)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return future

    def stop(self, *, wait: bool = True) -> None:
        """Cancel the calls that have not started, and end the thread. Calling it again is safe.

        Args:
            wait: wait for the running call; otherwise it goes on in the background.
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
            except BaseException as error:  # raised again by `Future.result`
                future.set_exception(error)
            del call, future, function  # these names keep the call's arguments alive


def result(future: Future[T], limit: TimeLimit) -> T:
    """Return the result of `future`, and wait for it until `limit` at most.

    Raises:
        StorageAwayError: the limit passed without a result.
    """
    woken = threading.Event()
    future.add_done_callback(lambda _: woken.set())
    with limit.watched(woken.set):
        woken.wait(None if math.isinf(limit.left) else limit.left)
    if not future.done():
        limit.check()
    return future.result()
