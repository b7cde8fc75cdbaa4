"""Work of an exchange beside the training, one piece at a time. Its error is raised by the call that waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tidewheel.daemon import start_daemon
from tidewheel.time_limit import TimeLimit


class Background:
    """Runs a piece of work in a thread; all ranks start and join the same pieces.

    Args:
        limit: of the generation; nothing waits for storage after it.
    """

    def __init__(self, limit: TimeLimit) -> None:
        self._limit = limit
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread, after the piece before it."""
        self.join()

        def run() -> None:
            try:
                with self._limit.applied():
                    work()
            except BaseException as error:  # raised again by `join`
                self._error = error

        self._thread = start_daemon(run, "outer exchange")

    def join(self) -> None:
        """Wait for the piece under way and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
