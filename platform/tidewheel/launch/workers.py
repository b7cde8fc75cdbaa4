"""What every job file needs of a run: how many workers its nodes can hold, and its configuration as text."""

from __future__ import annotations

import math

import yaml

from tidewheel.errors import ConfigError
from tidewheel.train.config import TrainConfig


def check(config: TrainConfig, *, nodes: int, cpus: int, gpus: int) -> None:
    """Check that nodes hold the workers of a run.

    Args:
        config: of the run.
        nodes: number of nodes.
        cpus: CPUs of a node.
        gpus: GPUs of a node.

    Raises:
        ConfigError: they hold fewer than elastic.min_workers, or GPUs would be idle.
    """
    needs = config.elastic
    each = math.floor(cpus / needs.cpus_per_worker)
    if needs.gpus_per_worker:
        each = min(each, math.floor(gpus / needs.gpus_per_worker))
    if nodes * each < needs.min_workers:
        raise ConfigError(f"{nodes} nodes of {cpus} CPUs and {gpus} GPUs hold {nodes * each} workers, fewer than "
                          f"elastic.min_workers {needs.min_workers}", where="--nodes",
                          fix="render more or larger nodes, or --set elastic.min_workers")
    if gpus and not needs.gpus_per_worker:
        raise ConfigError(f"the nodes have {gpus} GPUs each, but workers use none", where="--gpus-per-node",
                          fix="add --set elastic.gpus_per_worker=1, or leave the option out")
    if "://" not in config.run.uri and nodes > 1 and not config.run.uri.startswith("/"):
        raise ConfigError(f"run.uri {config.run.uri!r} is relative to the folder of the job", where="run.uri",
                          fix="give a folder that every node sees, as an absolute path, or a bucket")


def text(config: TrainConfig) -> str:
    """Return the settings that differ from the defaults, as YAML."""
    return yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True), sort_keys=False)
