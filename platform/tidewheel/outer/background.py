"""Work of an exchange beside the training, one piece at a time. Its error is raised by the call that waits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from tidewheel.time_limit import TimeLimit, result, started


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
        self._running = started(work, self._limit, "outer exchange")

    def join(self) -> None:
        """Wait for the piece under way, at most until the limit, and raise its error.

        Raises:
            StorageAwayError: the limit has passed.
        """
        future = self._running
        self._running = None
        if future is not None:
            result(future, self._limit)
