"""Weights & Biases, where the package is installed."""

from __future__ import annotations

import importlib.util
from typing import Literal

from pydantic import Field

from tidewheel.errors import ConfigError
from tidewheel.train.metrics.sinks import Sink
from tidewheel.train.metrics.tracker import TrackedRun, Tracker


class WeightsAndBiases(Tracker):
    """One run of the service. The key is read from the environment or ~/.netrc alone."""

    project: str = Field(min_length=1)
    """Project that the run appears in."""
    entity: str = ""
    """User or team; empty: the account's own."""
    mode: Literal["online", "offline"] = "online"
    """offline: written below `folder`, for `wandb sync`."""
    folder: str = ""
    """Local folder for what the client writes; empty: the system's temporary folder."""

    def check(self) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError("Weights & Biases is asked for, and its package is not installed",
                              where="metrics.trackers", fix="pip install wandb, on all nodes, or take wandb out")

    def open(self, run: TrackedRun) -> Sink | None:
        from tidewheel.train.trackers.clients.service_run import ServiceRun

        self.check()
        return ServiceRun(self, run)
