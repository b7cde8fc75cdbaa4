"""The client of Weights & Biases."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tidewheel.errors import ConfigError
from tidewheel.private_folders import user_folder
from tidewheel.train.metrics.scalars import scalars
from tidewheel.train.metrics.sinks import Record, Sink
from tidewheel.train.metrics.tracker import TrackedRun

if TYPE_CHECKING:
    from tidewheel.train.trackers.wandb import WeightsAndBiases

HOST = "api.wandb.ai"


class ServiceRun(Sink):
    """A sink that writes to one run of the service, continued under the same id after restarts.

    The service cannot delete history, so the sink leaves out steps that a run repeats after a failure.

    Args:
        config: project and mode.
        run: run whose records it takes.

    Raises:
        ConfigError: mode is online and there is no key.
    """

    def __init__(self, config: WeightsAndBiases, run: TrackedRun) -> None:
        if config.mode == "online" and not _has_key():  # the client would prompt on a terminal, which a worker lacks
            raise ConfigError("no key for Weights & Biases in this worker", where="metrics.trackers",
                              fix="set WANDB_API_KEY in the workers' environment (never in a configuration), or "
                                  "wandb's mode to offline")
        import wandb

        self._recorded = run.recorded
        self._run = wandb.init(
            project=config.project, entity=config.entity or None, id=run.id, name=run.id, resume="allow",
            config=dict(run.settings), mode=config.mode, dir=config.folder or str(user_folder("wandb")))
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        if int(record["step"]) > self._recorded:
            self._run.log({"step": int(record["step"]), **scalars(record)})

    def restart(self, step: int) -> None:
        """Do nothing: the service keeps the steps before a rollback and shows repeated steps twice."""

    def flush(self) -> None:
        """Do nothing: the client sends from its own process."""

    def close(self) -> None:
        self._run.finish()


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc").authenticators(HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False
