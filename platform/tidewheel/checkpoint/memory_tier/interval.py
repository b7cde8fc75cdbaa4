"""Decide after which steps the state goes to the memory tier. Rank 0 decides, and the step's report tells the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal


class KeepInterval:
    """Steps, or a share of the time, between two snapshots; on rank 0.

    Args:
        every_steps: keep the state every this many steps; 0: never; auto: as often as `share` allows.
        share: for auto, the share of the time that snapshots may cost.
        clock: monotonic seconds.
    """

    def __init__(self, every_steps: int | Literal["auto"], share: float,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._every_steps, self._share, self._clock = every_steps, share, clock
        self._began: float | None = None  # start of the newest snapshot

    def due(self, step: int, costs: Sequence[float]) -> bool:
        """Return whether to keep the state after `step`.

        Args:
            step: counts from 1.
            costs: see `MemoryTier.costs`.
        """
        if self._every_steps != "auto":
            return bool(self._every_steps) and step % self._every_steps == 0
        return self._began is None or self._clock() - self._began >= self.seconds(costs)

    def seconds(self, costs: Sequence[float]) -> float:
        """Return the seconds between the starts of two automatic snapshots; 0 while no cost is known.

        The least of the newest costs counts, so that one slow push does not put off the next snapshot for long.
        """
        return min(costs, default=0.0) / self._share

    def began(self) -> None:
        """Note that a snapshot has started."""
        self._began = self._clock()
