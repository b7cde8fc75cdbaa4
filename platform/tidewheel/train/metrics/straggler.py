"""Find ranks that make the others wait: a pure function of the readings that `Stragglers` gathers.

The median of an even number of ranks is the lower of the two middle values: of two ranks, the faster one's.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from tidewheel.train.collectives import Collectives
from tidewheel.train.metrics.config import StragglerConfig
from tidewheel.train.metrics.gpu_health import GpuHealth, Nvml
from tidewheel.train.metrics.measure import BusyTime
from tidewheel.train.metrics.own_time import OwnTime

UNKNOWN = -1
"""What a rank sends in place of a number that it does not know."""


@dataclass(frozen=True)
class Straggler:
    """A rank above the limit in every reading of the window."""

    rank: int
    own_seconds: float
    """The rank's own seconds per step, mean over the window."""
    median_seconds: float
    """Median over all ranks, mean over the window."""

    @property
    def over(self) -> float:
        """How far above the median, as a share of it."""
        return self.own_seconds / self.median_seconds - 1


def stragglers(readings: torch.Tensor, share: float) -> list[Straggler]:
    """Return the ranks that are more than `share` above the median in every reading.

    Args:
        readings: [window, ranks], seconds per step.
        share: 0.2 for 20 %.
    """
    medians = median(readings)
    slow = (readings > (1 + share) * medians[:, None]).all(dim=0)
    return [Straggler(rank, float(readings[:, rank].mean()), float(medians.mean()))
            for rank in slow.nonzero().flatten().tolist()]


def median(readings: torch.Tensor) -> torch.Tensor:
    """Return the median over ranks of each reading: [window] fp64 of [window, ranks]."""
    return readings.double().quantile(0.5, dim=1, interpolation="lower")


class Limit:
    """Reports each rank once when it exceeds a limit, and once when it no longer does.

    Args:
        kind: of the events.
        share: limit above the median, as a share of it.
    """

    def __init__(self, kind: str, share: float) -> None:
        self._kind, self._share = kind, share
        self._known: set[int] = set()

    def news(self, readings: torch.Tensor) -> list[tuple[str, dict[str, Any]]]:
        """Return the events that follow from `readings`, [window, ranks], newest last."""
        slow = {straggler.rank: straggler for straggler in stragglers(readings, self._share)}
        events: list[tuple[str, dict[str, Any]]] = [
            (self._kind, {"slow_rank": rank, "own_seconds": round(straggler.own_seconds, 6),
                          "median_seconds": round(straggler.median_seconds, 6), "over": round(straggler.over, 3)})
            for rank, straggler in slow.items() if rank not in self._known]
        limit = (1 + self._share) * float(median(readings[-1:]))
        back = {rank for rank in self._known - slow.keys() if float(readings[-1, rank]) <= limit}
        events += [(f"{self._kind}_over", {"slow_rank": rank}) for rank in sorted(back)]
        self._known = (self._known | slow.keys()) - back
        return events


class Stragglers:
    """Gathers the ranks' own seconds per step every few steps, and reports slow ranks.

    Args:
        config: the interval, the window and the limit.
        collectives: over all ranks.
        slow_factor: a rank this many times above the median is also a "slow_worker".
        own_time: measures this rank's own time; default: the time that the calling thread is busy.
        nvml: reads the state of this rank's GPU; None without a GPU.
    """

    def __init__(self, config: StragglerConfig, collectives: Collectives, slow_factor: float = math.inf, *,
                 own_time: OwnTime | None = None, nvml: Nvml | None = None) -> None:
        self._config, self._collectives = config, collectives
        self._limits = [Limit("straggler", config.share), Limit("slow_worker", slow_factor - 1)]
        self._own_time, self._nvml = own_time, nvml
        self._started = False
        self._waited, self._steps = 0.0, 0
        self._readings: deque[torch.Tensor] = deque(maxlen=config.window)
        self._unread: list[float] = []
        self.health: list[GpuHealth] = []
        """State of each rank's GPU at the newest reading; on rank 0, and only with GPUs that tell it."""

    def step(self, waited: float) -> list[tuple[str, dict[str, Any]]]:
        """Take a reading if one is due. All ranks call it at the end of each step.

        Args:
            waited: seconds that this rank waited for data in the step.

        Returns:
            On rank 0 the events to record: ("straggler", {"slow_rank", "own_seconds", "median_seconds", "over"} and,
            if known, "gpu") when a rank first exceeds the limit, ("straggler_over", {"slow_rank"}) when it no longer
            does, and "slow_worker" and "slow_worker_over" likewise; else [].
        """
        config = self._config
        if not config.every_steps or (self._collectives.world_size == 1 and self._nvml is None):
            return []
        if not self._started:  # leave out the start-up of the first step
            self._started = True
            if self._own_time is None:
                self._own_time = BusyTime()
            self._own_time.restart()
            return []
        assert self._own_time is not None
        self._own_time.end_step()
        self._waited, self._steps = self._waited + waited, self._steps + 1
        if self._steps < config.every_steps:
            return []
        busy = self._own_time.seconds_per_step(self._steps)
        own = UNKNOWN if busy is None else int((busy + self._waited / self._steps) * 1e9)
        self._waited, self._steps = 0.0, 0
        health = self._nvml.read() if self._nvml is not None else GpuHealth()
        gathered = self._collectives.gather_all(
            torch.tensor([own, health.clock_mhz, health.temperature_c, health.reasons]))
        if gathered is None:
            return []
        table = gathered.view(-1, 4)
        self.health = [GpuHealth(*row) for row in table[:, 1:].tolist()] if (table[:, 1:] != UNKNOWN).any() else []
        if (table[:, 0] == UNKNOWN).any():  # some device is not done with the step that was measured
            return []
        self._readings.append(table[:, 0].double() / 1e9)
        self._unread = self._readings[-1].tolist()
        if len(self._readings) < config.window:
            return []
        readings = torch.stack(list(self._readings))
        events = [event for limit in self._limits for event in limit.news(readings)]
        for _, detail in events:
            if self.health and "own_seconds" in detail:
                detail["gpu"] = self.health[detail["slow_rank"]].describe()
        return events

    def close(self) -> None:
        """Stop measuring."""
        if self._own_time is not None:
            self._own_time.close()
        if self._nvml is not None:
            self._nvml.close()

    def reading(self) -> list[float]:
        """Return the ranks' own seconds per step, once after each gather on rank 0; else []."""
        reading, self._unread = self._unread, []
        return reading
