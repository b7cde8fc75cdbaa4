"""Metrics of a run as gauges of Ray, which every node exports to Prometheus at its metrics port."""

from __future__ import annotations

import re
from typing import Any

from tidewheel.train.metrics.scalars import scalars
from tidewheel.train.metrics.sinks import Record, Sink


class RayGauges(Sink):
    """A sink that sets gauges `ray_tidewheel_<name>`, such as `ray_tidewheel_train_loss` and `ray_tidewheel_speed_mfu`.

    Gauges have the label `run`, and validation gauges also `domain`. The process must be connected to Ray.

    Args:
        run: id of the run.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[str, Any] = {}

    def write(self, record: Record) -> None:
        self._set("step", float(record["step"]), "")
        for tag, value in scalars(record).items():
            group, *domain, name = tag.split("/")
            self._set(f"{group}_{name}", value, "/".join(domain))

    def restart(self, step: int) -> None:
        """Do nothing: the next step sets the gauges."""

    def flush(self) -> None:
        """Do nothing: Ray exports the gauges by itself."""

    def close(self) -> None:
        """Do nothing: the values stay until the process ends."""

    def _set(self, name: str, value: float, domain: str) -> None:
        from ray.util.metrics import Gauge

        name = "tidewheel_" + re.sub(r"\W", "_", name)
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, description=f"{name} of a training run", tag_keys=("run", "domain"))
        self._gauges[name].set(value, tags={"run": self._run, "domain": domain})
