"""Gauges `ray_tidewheel_*` at the Ray nodes' metrics ports."""

from __future__ import annotations

from tidewheel.train.metrics.sinks import Sink
from tidewheel.train.metrics.tracker import TrackedRun, Tracker


class Prometheus(Tracker):
    """Gauges at the Ray nodes' metrics ports; nothing without a cluster."""

    def open(self, run: TrackedRun) -> Sink | None:
        return run.gauges() if run.gauges is not None else None
