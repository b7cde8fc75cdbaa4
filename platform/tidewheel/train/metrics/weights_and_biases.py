"""Weights & Biases, where the package is installed and asked for."""

from __future__ import annotations

import importlib.util
import netrc
import os
from pathlib import Path
from typing import Any

from tidewheel.errors import ConfigError
from tidewheel.private_folders import user_folder
from tidewheel.train.metrics.config import WandbConfig
from tidewheel.train.metrics.sinks import Record
from tidewheel.train.metrics.tensorboard import scalars

HOST = "api.wandb.ai"


def check(config: WandbConfig | None) -> None:
    """Raise ConfigError when Weights & Biases is asked for and its package is missing."""
    if config is not None and importlib.util.find_spec("wandb") is None:
        raise ConfigError("Weights & Biases is asked for, and its package is not installed", where="metrics.wandb",
                          mend="pip install wandb, on all nodes, or take metrics.wandb out")


class WeightsAndBiases:
    """A sink that is one run of the service, continued under the same id after restarts.

    Its history cannot be taken back, so steps that are done again after a failure are left out.

    Args:
        config: project and mode.
        run: id of the run.
        settings: the run's configuration, without secrets.
        recorded: last step that an earlier generation recorded.

    Raises:
        ConfigError: the package is missing, or mode is online and there is no key.
    """

    name = "wandb"

    def __init__(self, config: WandbConfig, *, run: str, settings: dict[str, Any], recorded: int) -> None:
        check(config)
        if config.mode == "online" and not _has_key():  # the client would ask at a terminal that is not there
            raise ConfigError("no key for Weights & Biases in this worker", where="metrics.wandb",
                              mend="set WANDB_API_KEY in the workers' environment (never in a configuration), or "
                                   "metrics.wandb.mode to offline")
        import wandb

        self._recorded = recorded
        self._run = wandb.init(project=config.project, entity=config.entity or None, id=run, name=run, resume="allow",
                               config=settings, mode=config.mode, dir=config.folder or str(user_folder("wandb")))
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        if int(record["step"]) > self._recorded:
            self._run.log({"step": int(record["step"]), **scalars(record)})

    def restart(self, step: int) -> None:
        """Its history cannot be taken back: steps after a rollback, which read other data, are there twice."""

    def flush(self) -> None:
        """The client sends from a process of its own."""

    def close(self) -> None:
        self._run.finish()


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc").authenticators(HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False
