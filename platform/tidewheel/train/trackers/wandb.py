"""Weights & Biases; needs the package `wandb`."""

from __future__ import annotations

import importlib.util
from typing import Literal

from pydantic import Field

from tidewheel.errors import ConfigError
from tidewheel.train.metrics.sinks import Sink
from tidewheel.train.metrics.tracker import TrackedRun, Tracker


class WeightsAndBiases(Tracker):
    """One run of the service. The key comes from the environment or ~/.netrc."""

    project: str = Field(min_length=1)
    """Project of the run."""
    entity: str = ""
    """User or team; empty: the account's default."""
    mode: Literal["online", "offline"] = "online"
    """offline: write to `folder`, for `wandb sync`."""
    folder: str = ""
    """Local folder for the client's files; empty: the system's temporary folder."""

    def check(self) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError("the package of Weights & Biases is not installed",
                              where="metrics.trackers", fix="run `pip install wandb` on all nodes, or remove wandb")

    def open(self, run: TrackedRun) -> Sink | None:
        from tidewheel.train.trackers.clients.service_run import ServiceRun

        self.check()
        return ServiceRun(self, run)
