"""Call functions whose errors must not end their thread: log, count and record the errors, and continue."""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)
QUIET_SECONDS = 60.0
"""An error of the same kind at the same place is reported at most this often, with its number of occurrences."""
Record = Callable[[str, dict[str, Any]], None]


class Supervisor:
    """Supervises the calls of one thread.

    Args:
        record: records an event; it may fail itself.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._reported: dict[tuple[str, str], float] = {}
        self._since: Counter[tuple[str, str]] = Counter()
        self.errors: Counter[str] = Counter()
        """Number of errors at each place."""

    def call(self, where: str, function: Callable[..., Any], *arguments: Any) -> bool:
        """Call `function(*arguments)` and return whether it succeeded.

        Args:
            where: name of the place, for the report of an error.
            function: what to call.
            arguments: its arguments.
        """
        try:
            function(*arguments)
        except Exception as error:
            self.failed(where, error)
            return False
        return True

    def failed(self, where: str, error: BaseException) -> None:
        """Report an error as an event `control_error`, unless the same kind was reported here a moment ago."""
        kind = (where, type(error).__name__)
        self.errors[where] += 1
        self._since[kind] += 1
        now = time.monotonic()
        if now - self._reported.get(kind, -QUIET_SECONDS) < QUIET_SECONDS:
            return
        self._reported[kind] = now
        detail = {"where": where, "error": f"{type(error).__name__}: {error}"[:300], "times": self._since.pop(kind)}
        logger.error("%s\n%s", where, "".join(traceback.format_exception(error, limit=-8)).rstrip())
        try:
            self._record("control_error", detail)
        except Exception as second:  # probably the same cause; the first error is in the process's log
            self.errors["events"] += 1
            logger.error("the event cannot be recorded: %s", second)
