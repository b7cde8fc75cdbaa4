"""Daemon threads for calls that may hang in storage and must not hold up the exit of the process for long.

Python ends daemon threads by force when the process exits. One that is inside C++ code then (torch, pyarrow) makes the
process abort with "terminate called without an active exception", and the exit code is lost. So the exit waits a few
seconds for the threads of this module.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

EXIT_SECONDS = 5.0
"""The exit of the process waits this long for all threads together; one that still runs then hangs in storage."""
T = TypeVar("T")
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_queues: weakref.WeakSet[DaemonThread] = weakref.WeakSet()
_lock = threading.Lock()
"""Held while one of the two sets changes or is read."""


def start_daemon(work: Callable[[], Any], name: str) -> threading.Thread:
    """Run `work` in a daemon thread of its own, and return the thread."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    with _lock:
        _threads.add(thread)
    thread.start()
    return thread


@atexit.register
def _wait_at_exit() -> None:
    """Wait for the threads that are at work."""
    with _lock:
        queues, threads = list(_queues), list(_threads)
    for thread_queue in queues:
        thread_queue.stop(wait=False)
    until = time.monotonic() + EXIT_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


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
        with _lock:
            _queues.add(self)

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
            self._thread = start_daemon(self._run, self._name)
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
