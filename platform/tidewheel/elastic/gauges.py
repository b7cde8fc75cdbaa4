"""Metrics of a run as gauges of Ray, which every node offers to Prometheus at its metrics port."""

from __future__ import annotations

import re
from typing import Any

from tidewheel.train.metrics.scalars import scalars
from tidewheel.train.metrics.sinks import Record


class RayGauges:
    """A sink of gauges `ray_tidewheel_<name>` (`ray_tidewheel_train_loss`, `ray_tidewheel_speed_mfu`, ...) with the
    label `run`, and `domain` for those of the validation. To be made in a process that is connected to Ray."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[str, Any] = {}

    def write(self, record: Record) -> None:
        self._set("step", float(record["step"]), "")
        for tag, value in scalars(record).items():
            group, *domain, name = tag.split("/")
            self._set(f"{group}_{name}", value, "/".join(domain))

    def restart(self, step: int) -> None:
        """The next step sets them anew."""

    def flush(self) -> None:
        """Ray sends them by itself."""

    def close(self) -> None:
        """The values stay until the process ends."""

    def _set(self, name: str, value: float, domain: str) -> None:
        from ray.util.metrics import Gauge

        name = "tidewheel_" + re.sub(r"\W", "_", name)
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, description=f"{name} of a training run", tag_keys=("run", "domain"))
        self._gauges[name].set(value, tags={"run": self._run, "domain": domain})
