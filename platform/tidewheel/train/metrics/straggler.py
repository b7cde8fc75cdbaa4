"""Which rank makes the others wait. A pure function of the ranks' readings; who gathers them is `Stragglers`.

Of an even number of ranks the median is the lower of the two in the middle: of two ranks the faster one counts.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from tidewheel.train.collectives import Collectives
from tidewheel.train.metrics.config import StragglerConfig
from tidewheel.train.metrics.measure import BusyTime


@dataclass(frozen=True)
class Straggler:
    """A rank over the limit in every reading of the window."""

    rank: int
    own_seconds: float
    """Its own time per step, mean over the window."""
    median_seconds: float
    """Median over all ranks, mean over the window."""

    @property
    def over(self) -> float:
        """Share above the median."""
        return self.own_seconds / self.median_seconds - 1


def stragglers(readings: torch.Tensor, share: float) -> list[Straggler]:
    """Ranks more than `share` over the median of the ranks in each reading.

    Args:
        readings: [window, ranks], seconds per step.
        share: 0.2 for 20 %.
    """
    medians = median(readings)
    slow = (readings > (1 + share) * medians[:, None]).all(dim=0)
    return [Straggler(rank, float(readings[:, rank].mean()), float(medians.mean()))
            for rank in slow.nonzero().flatten().tolist()]


def median(readings: torch.Tensor) -> torch.Tensor:
    """[window] of [window, ranks], fp64."""
    return readings.double().quantile(0.5, dim=1, interpolation="lower")


class Limit:
    """Who is over one limit, told once when it begins and once when it is over."""

    def __init__(self, kind: str, share: float) -> None:
        self._kind, self._share = kind, share
        self._known: set[int] = set()

    def news(self, readings: torch.Tensor) -> list[tuple[str, dict[str, Any]]]:
        """Events after the newest of `readings` [window, ranks]."""
        found = {each.rank: each for each in stragglers(readings, self._share)}
        events: list[tuple[str, dict[str, Any]]] = [
            (self._kind, {"slow_rank": rank, "own_seconds": round(each.own_seconds, 6),
                          "median_seconds": round(each.median_seconds, 6), "over": round(each.over, 3)})
            for rank, each in found.items() if rank not in self._known]
        limit = (1 + self._share) * float(median(readings[-1:]))
        back = {rank for rank in self._known - found.keys() if float(readings[-1, rank]) <= limit}
        events += [(f"{self._kind}_over", {"slow_rank": rank}) for rank in sorted(back)]
        self._known = (self._known | found.keys()) - back
        return events


class Stragglers:
    """Gathers the ranks' own time per step every few steps and says who is slow: once, until it no longer is.

    Args:
        slow_factor: a rank this many times over the median is a "slow_worker" beside being a straggler.
    """

    def __init__(self, config: StragglerConfig, collectives: Collectives, slow_factor: float = math.inf) -> None:
        self._config, self._collectives = config, collectives
        self._limits = [Limit("straggler", config.share), Limit("slow_worker", slow_factor - 1)]
        self._busy: BusyTime | None = None
        self._waited, self._steps = 0.0, 0
        self._readings: deque[torch.Tensor] = deque(maxlen=config.window)
        self._unread: list[float] = []

    def step(self, waited: float) -> list[tuple[str, dict[str, Any]]]:
        """Called by all ranks at the end of each step, with the seconds it waited for data.

        Returns:
            On rank 0 the events to record: ("straggler", {"slow_rank", "own_seconds", "median_seconds", "over"}) when
            a rank is first over the limit, ("straggler_over", {"slow_rank"}) when it is back, and "slow_worker" and
            "slow_worker_over" likewise; else [].
        """
        config = self._config
        if not config.every_steps or self._collectives.world_size == 1:
            return []
        if self._busy is None:  # from here on: what came before was starting up
            self._busy = BusyTime()
            return []
        self._waited, self._steps = self._waited + waited, self._steps + 1
        if self._steps < config.every_steps:
            return []
        own = (self._busy.seconds() + self._waited) / self._steps
        self._waited, self._steps = 0.0, 0
        gathered = self._collectives.gather_all(torch.tensor([int(own * 1e9)]))
        if gathered is None:
            return []
        self._readings.append(gathered.double() / 1e9)
        self._unread = self._readings[-1].tolist()
        if len(self._readings) < config.window:
            return []
        readings = torch.stack(list(self._readings))
        return [event for limit in self._limits for event in limit.news(readings)]

    def close(self) -> None:
        """Let go of the clock."""
        if self._busy is not None:
            self._busy.close()

    def reading(self) -> list[float]:
        """The ranks' own seconds per step, once after each gather, on rank 0; else []."""
        found, self._unread = self._unread, []
        return found
