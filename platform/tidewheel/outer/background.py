"""Work of an exchange beside the training, one piece at a time. Its error is raised by the call that waits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from tidewheel.daemon import start_daemon
from tidewheel.time_limit import TimeLimit, result


class Background:
    """Runs a piece of work in a thread; all ranks start and join the same pieces.

    Args:
        limit: of the generation; nothing waits for storage after it.
    """

    def __init__(self, limit: TimeLimit) -> None:
        self._limit = limit
        self._running: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread, after the piece before it."""
        self.join()
        future: Future[None] = Future()

        def run() -> None:
            try:
                with self._limit.applied():
                    work()
                future.set_result(None)
            except BaseException as error:  # raised again by `join`
                future.set_exception(error)

        self._running = future
        start_daemon(run, "outer exchange")

    def join(self) -> None:
        """Wait for the piece under way, at most until the limit, and raise its error.

        Raises:
            StorageAwayError: the limit has passed, and the piece hangs in storage.
        """
        future = self._running
        self._running = None
        if future is not None:
            result(future, self._limit)
