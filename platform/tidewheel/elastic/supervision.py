"""Calls that must not end whoever makes them: their errors are told and counted, and the work goes on."""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)
QUIET_SECONDS = 60.0
"""An error of the same kind at the same place is told again after this long, with how often it came."""
Tell = Callable[[str, dict[str, Any]], None]


class Supervisor:
    """Of one thread's work.

    Args:
        tell: records an event; may fail itself.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._told: dict[tuple[str, str], float] = {}
        self._since: Counter[tuple[str, str]] = Counter()
        self.errors: Counter[str] = Counter()
        """By place, since the start."""

    def call(self, where: str, function: Callable[..., Any], *arguments: Any) -> bool:
        """Call `function(*arguments)`; False when that failed, which is told as an event `control_error`."""
        try:
            function(*arguments)
        except Exception as error:
            self.failed(where, error)
            return False
        return True

    def failed(self, where: str, error: BaseException) -> None:
        """`error` happened at `where`."""
        kind = (where, type(error).__name__)
        self.errors[where] += 1
        self._since[kind] += 1
        now = time.monotonic()
        if now - self._told.get(kind, -QUIET_SECONDS) < QUIET_SECONDS:
            return
        self._told[kind] = now
        detail = {"where": where, "error": f"{type(error).__name__}: {error}"[:300], "times": self._since.pop(kind)}
        logger.error("%s\n%s", where, "".join(traceback.format_exception(error, limit=-8)).rstrip())
        try:
            self._tell("control_error", detail)
        except Exception as second:  # the same cause, more likely than not; the first is in the process's log
            self.errors["events"] += 1
            logger.error("the event cannot be recorded: %s", second)
