"""Measure the loop's steps, hand the figures to the sinks, and record unusual findings as events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from tidewheel.provenance import without_secrets
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.metrics.gpu_health import UNKNOWN, GpuHealth, open_nvml
from tidewheel.train.metrics.meter import Meter
from tidewheel.train.metrics.own_time import OwnTime
from tidewheel.train.metrics.profile import Profiler
from tidewheel.train.metrics.sinks import Background, Sink, settle
from tidewheel.train.metrics.straggler import Stragglers
from tidewheel.train.metrics.tracked import open_sinks
from tidewheel.train.metrics.tracker import TrackedRun
from tidewheel.train.record import RunRecord

OnEvent = Callable[..., None]
"""Called with (kind, **detail) on rank 0."""
SETTLE_SECONDS = 5.0
"""Longest wait for slow sinks of an earlier generation of this process."""
OWN_NAMES = frozenset({"step", "time", "generation", "tokens", "loss", "validation_loss", "validation", "sample",
                       "objective", "sources", "tasks"})
"""Names in metrics.jsonl that other code depends on. Callbacks must not use them."""
LISTED_RANKS = 64
"""Up to this many ranks, metrics.jsonl has each rank's own time; with more, only the slowest rank's."""


class Reporter:
    """Reports the figures of one rank. All ranks make the same calls; only rank 0 writes.

    Args:
        config: the run's settings.
        record: the run's files.
        collectives: over all ranks.
        flops_per_token: see `Model.flops_per_token`.
        generation: number of the group of workers.
        gauges: creates the cluster's own gauges; None without a cluster.
        on_event: called with (kind, **detail).
        own_time: measures this rank's own time; default: the time that the calling thread is busy.
    """

    def __init__(self, config: TrainConfig, record: RunRecord, collectives: Collectives, *, flops_per_token: float,
                 generation: int, gauges: Callable[[], Sink] | None, on_event: OnEvent,
                 own_time: OwnTime | None = None) -> None:
        self._config, self._record, self._generation = config, record, generation
        self._gauges, self._on_event, self._rank = gauges, on_event, collectives.rank
        self._world_size = collectives.world_size
        self._meter = Meter(config.metrics.every_steps, config.steps, collectives.world_size, collectives.device,
                            flops_per_token)
        self._stragglers = Stragglers(
            config.metrics.straggler, collectives,
            math.inf if config.elastic.slow_worker == "ignore" else config.elastic.slow_factor,
            own_time=own_time, nvml=open_nvml(collectives.device))
        self._profiler = Profiler(config.profile, record.store, collectives.device) if self._rank == 0 else None
        self._sinks: Background | None = None
        self._news: dict[int, list[tuple[str, dict[str, Any]]]] = {}  # of ranks' own times, by step

    def open(self, *, step: int, recorded: int) -> None:
        """Open the trackers on rank 0.

        Args:
            step: the run continues after it.
            recorded: last step that was recorded before.

        Raises:
            ConfigError: a tracker cannot work here, or its code has a mistake.
        """
        if self._rank == 0:
            settle(SETTLE_SECONDS)
            run = TrackedRun(self._config.run.id, self._record.store, step, recorded, self._generation,
                             without_secrets(self._config.canonical()), self._gauges)
            self._sinks = Background(open_sinks(self._config.metrics.trackers, run), self._failed)

    def begin(self, step: int) -> None:
        """Note that `step` is about to start."""
        if self._profiler is not None:
            self._profiler.begin(step)

    def measure(self, step: int, waited: float) -> None:
        """Measure this rank's own time, for `step`; call it when the step is enqueued and no later one is.

        All ranks call it, or none.

        Args:
            step: counts from 1.
            waited: seconds of the wait for data.
        """
        self._news[step] = self._stragglers.step(waited)

    def is_due(self, step: int) -> bool:
        """Return whether `step` has a line."""
        return self._meter.is_due(step)

    def step(self, step: int, figures: Mapping[str, Any], *, tokens: int, seconds: float, waited: float,
             communication: float = 0.0) -> None:
        """Report a step that is done.

        Args:
            step: counts from 1.
            figures: results of the step: loss, gradient norm and the like.
            tokens: real tokens of the global batch.
            seconds: duration of the step on this rank, with the wait for data.
            waited: seconds of the wait for data.
            communication: seconds for which the step waited for other workers.

        Raises:
            ConfigError: the code of a tracker has a mistake.
        """
        if step not in self._news:
            self.measure(step, waited)
        events = self._news.pop(step)
        line = self._meter.step(step, tokens=tokens, seconds=seconds, waited=waited, communication=communication)
        if self._sinks is not None and line is not None:
            self._write({"step": step, "generation": self._generation, "world_size": self._world_size,
                         **figures, **line, **self._own_seconds(), **self._failures()})
        for kind, detail in events:
            self._on_event(kind, step=step, **detail)
        if self._profiler is not None and (written := self._profiler.end(step)):
            self._on_event("profile", step=step, files=written)

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Write a record of its own at `step`: an evaluation, a sample."""
        if self._sinks is not None:
            self._write({"time": time.time(), "step": step, **values})

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Record a callback's figures at `step`.

        Raises:
            ValueError: a name is the training's own, or a value is no number.
        """
        taken = sorted(OWN_NAMES & figures.keys())
        if taken:
            raise ValueError(f"{taken[0]!r} is a name of the training's own figures; choose another, such as "
                             f"'my_{taken[0]}'")
        self.record(step, {name: float(value) for name, value in figures.items()})

    def restart(self, step: int) -> None:
        """Have the trackers continue after `step`, where the run went back to."""
        if self._sinks is not None:
            self._sinks.restart(step)

    def flush(self) -> None:
        """Write out the records that sinks hold."""
        if self._sinks is not None:
            self._sinks.flush()

    def finish(self) -> None:
        """Write out everything at the end of the run."""
        if self._sinks is not None:
            self._sinks.close()

    def close(self) -> None:
        """Close everything without waiting for slow sinks."""
        if self._sinks is not None:
            self._sinks.leave()
        if self._profiler is not None:
            self._profiler.close()
        self._stragglers.close()

    def _write(self, record: dict[str, Any]) -> None:
        assert self._sinks is not None
        self._record.metrics.append(record)  # at once: a checkpoint carries the lines that are not written yet
        self._sinks.write(record)

    def _failed(self, sink: str, reason: str, failures: int) -> None:
        self._on_event("sink_failed", sink=sink, reason=reason, failures=failures)

    def _failures(self) -> dict[str, int]:
        """Return the count of the trackers' failed calls, once there are any."""
        failures = self._sinks.failures.total() if self._sinks is not None else 0
        return {"tracker_failures": failures} if failures else {}

    def _own_seconds(self) -> dict[str, Any]:
        """Return the newest reading of the ranks' own time, once."""
        readings = self._stragglers.reading()
        if not readings:
            return {}
        slowest = max(range(len(readings)), key=readings.__getitem__)
        fields: dict[str, Any] = {"slowest_rank": slowest, "slowest_own_seconds": readings[slowest]}
        if len(readings) <= LISTED_RANKS:
            fields["own_seconds"] = readings
        return {**fields, **_gpu_figures(self._stragglers.health)}


def _gpu_figures(health: list[GpuHealth]) -> dict[str, Any]:
    """Return the figures of the ranks' GPUs; {} where they are not known."""
    clocks = [gpu.clock_mhz for gpu in health if gpu.clock_mhz != UNKNOWN]
    temperatures = [gpu.temperature_c for gpu in health if gpu.temperature_c != UNKNOWN]
    fields: dict[str, Any] = {}
    if clocks:
        fields["least_clock_mhz"] = min(clocks)
    if temperatures:
        fields["highest_temperature_c"] = max(temperatures)
    if any(gpu.reasons != UNKNOWN for gpu in health):
        slowed = {str(rank): gpu.throttled_by for rank, gpu in enumerate(health) if gpu.throttled_by}
        fields |= {"throttled_gpus": len(slowed), "throttled_by": dict(islice(slowed.items(), LISTED_RANKS))}
    return fields
