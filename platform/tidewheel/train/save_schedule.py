"""When the run's state is saved: rank 0 asks its clock, and tells the others through the report of the step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tidewheel.train.checkpoint_config import CheckpointConfig
from tidewheel.train.runtime import Saves

SHORTEST_SECONDS, LONGEST_SECONDS = 10.0, 3600.0
"""Bounds of an automatic interval."""
ROOM = 1.25
"""An automatic interval is at least so many times what a save takes: one is not begun before the last is over."""


def young_daly(cost_seconds: float, failure_seconds: float) -> float:
    """The interval between saves that loses least time: sqrt(2 C M), in seconds (Young 1974; Daly 2006, first order).

    Args:
        cost_seconds: for which a save keeps the training waiting.
        failure_seconds: mean time between failures.
    """
    return math.sqrt(2.0 * cost_seconds * failure_seconds)


class SaveSchedule:
    """Asked once a step, on rank 0.

    Args:
        started: Unix time of the run's first start.
        failures: that the run has met so far.
        clock: monotonic seconds.
    """

    def __init__(self, config: CheckpointConfig, *, started: float, failures: int,
                 clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time) -> None:
        self._config, self._clock = config, clock
        self._began = clock()  # of the newest save, or of this generation
        self.owed = False
        """One was put off, or ended with the generation that began it."""
        # one failure is assumed to come: the estimate begins at the expected value and follows what is seen
        seen = max(0.0, now() - started)
        self.failure_seconds = (config.expected_failure_seconds + seen) / (1 + failures)

    def due(self, step: int, saves: Saves) -> bool:
        """Whether to save after `step`."""
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
        """Seconds between automatic saves. Before the first there is nothing to go by: as soon as may be."""
        best = young_daly(saves.stall_seconds, self.failure_seconds)
        return max(SHORTEST_SECONDS, ROOM * saves.seconds, min(best, LONGEST_SECONDS))

    def began(self) -> None:
        """A save has begun, for whatever reason."""
        self.owed = False
        self._began = self._clock()
