"""Decide when to save. Rank 0 decides by its clock, and the report of the step carries the decision to the others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tidewheel.train.checkpoint_config import CheckpointConfig
from tidewheel.train.runtime import Saves

SHORTEST_SECONDS, LONGEST_SECONDS = 10.0, 3600.0
"""Bounds of an automatic interval."""
ROOM = 1.25
"""Least ratio of an automatic interval to the duration of a save, so that saves do not overlap."""


def young_daly(cost_seconds: float, failure_seconds: float) -> float:
    """Return the interval between saves that loses least time, in seconds.

    It is sqrt(2 C M), to first order (Young 1974; Daly 2006).

    Args:
        cost_seconds: how long a save keeps the training waiting.
        failure_seconds: mean time between failures.
    """
    return math.sqrt(2.0 * cost_seconds * failure_seconds)


class SaveSchedule:
    """Decides after each step whether to save; on rank 0.

    Args:
        config: the configured intervals.
        started: Unix time of the run's first start.
        failures: failures of the run so far.
        clock: monotonic seconds.
        now: Unix seconds.
    """

    def __init__(self, config: CheckpointConfig, *, started: float, failures: int,
                 clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time) -> None:
        self._config, self._clock = config, clock
        self._began = clock()  # start of the newest save, or of this generation
        self.owed = False
        """Whether a save was put off, or ended with its generation."""
        # Assume one more failure: the estimate starts at the expected value and follows the observed ones.
        seen = max(0.0, now() - started)
        self.failure_seconds = (config.expected_failure_seconds + seen) / (1 + failures)

    def due(self, step: int, saves: Saves) -> bool:
        """Return whether to save after `step`, given the state of earlier saves."""
        config, waited = self._config, self._clock() - self._began
        if self.owed and not saves.busy:
            return True
        if saves.failed and not saves.busy and waited >= saves.seconds + config.retry_seconds:
            return True
        if config.every_seconds and waited >= config.every_seconds:
            return True
        if config.every_steps == "auto":
            return not saves.busy and waited >= self.interval(saves)
        return bool(config.every_steps) and step % config.every_steps == 0

    def interval(self, saves: Saves) -> float:
        """Return the seconds between automatic saves; the least possible before the first, whose cost is unknown."""
        best = young_daly(saves.stall_seconds, self.failure_seconds)
        return max(SHORTEST_SECONDS, ROOM * saves.seconds, min(best, LONGEST_SECONDS))

    def began(self) -> None:
        """Note that a save has started."""
        self.owed = False
        self._began = self._clock()
