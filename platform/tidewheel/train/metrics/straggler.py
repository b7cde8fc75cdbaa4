"""Which rank makes the others wait. A pure function of the ranks' readings; who gathers them is `Stragglers`."""

from __future__ import annotations

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
    medians = readings.double().quantile(0.5, dim=1)
    slow = (readings > (1 + share) * medians[:, None]).all(dim=0)
    return [Straggler(rank, float(readings[:, rank].mean()), float(medians.mean()))
            for rank in slow.nonzero().flatten().tolist()]


class Stragglers:
    """Gathers the ranks' own time per step every few steps and says who is slow: once, until it no longer is."""

    def __init__(self, config: StragglerConfig, collectives: Collectives) -> None:
        self._config, self._collectives = config, collectives
        self._busy: BusyTime | None = None
        self._waited, self._steps = 0.0, 0
        self._readings: deque[torch.Tensor] = deque(maxlen=config.window)
        self._known: set[int] = set()
        self._unread: list[float] = []

    def step(self, waited: float) -> list[tuple[str, dict[str, Any]]]:
        """Called by all ranks at the end of each step, with the seconds it waited for data.

        Returns:
            On rank 0 the events to record: ("straggler", {"rank", "own_seconds", "median_seconds", "over"}) when a
            rank is first over the limit, ("straggler_over", {"rank"}) when it is back; else [].
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
        return self._news() if len(self._readings) == config.window else []

    def close(self) -> None:
        """Let go of the clock."""
        if self._busy is not None:
            self._busy.close()

    def reading(self) -> list[float]:
        """The ranks' own seconds per step, once after each gather, on rank 0; else []."""
        found, self._unread = self._unread, []
        return found

    def _news(self) -> list[tuple[str, dict[str, Any]]]:
        found = {each.rank: each for each in stragglers(torch.stack(list(self._readings)), self._config.share)}
        events: list[tuple[str, dict[str, Any]]] = [
            ("straggler", {"slow_rank": rank, "own_seconds": round(each.own_seconds, 6),
                           "median_seconds": round(each.median_seconds, 6), "over": round(each.over, 3)})
            for rank, each in found.items() if rank not in self._known]
        latest = self._readings[-1]
        limit = (1 + self._config.share) * float(latest.quantile(0.5))
        back = {rank for rank in self._known - found.keys() if float(latest[rank]) <= limit}
        events += [("straggler_over", {"slow_rank": rank}) for rank in sorted(back)]
        self._known = (self._known | found.keys()) - back
        return events
