"""What to change when no layout of a run fits, with the price in time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.models import adapters
from tidewheel.plan.hardware import ClusterConfig
from tidewheel.plan.layout import Job
from tidewheel.plan.layouts import Planned, fastest_of_any_size, rank
from tidewheel.train import optimizers
from tidewheel.train.config import TrainConfig

HOST = {"parallel.data": "zero3", "parallel.offload": "true"}
INPUTS = {"memory.activation_checkpointing": "offload"}
DISK = {"memory.optimizer_disk": "/local_nvme", "checkpoint.memory_tier.every_steps": 0}
SAME, ROUNDED, FEW = "the same", "moments are rounded", "1 % of the parameters"


@dataclass(frozen=True)
class Change:
    """Settings that take less memory on the GPUs."""

    what: str
    settings: dict[str, Any]
    trains: str
    """What is trained: the same, or something else."""


def changes() -> list[Change]:
    """Return what a plan tries, from what changes least to what changes most.

    Optimizers and adapters say themselves that they are to be proposed (`Optimizer.COMPACT`, `Adapter.PROPOSED`).
    """
    found = [Change("inputs of blocks in host memory", INPUTS, SAME),
             Change("parameters, gradients and state in host memory", HOST, SAME),
             Change("both", {**HOST, **INPUTS}, SAME),
             Change("all, and the state on disk", {**HOST, **INPUTS, **DISK}, SAME)]
    for name in optimizers.KIND.built_in():
        what = optimizers.KIND.find(name).COMPACT
        if not what:
            continue
        found.append(Change(what, {"optimizer.kind": name, **INPUTS}, ROUNDED))
        found.append(Change(f"{what} in host memory", {"optimizer.kind": name, **HOST, **INPUTS}, ROUNDED))
    for name in adapters.KIND.built_in():
        proposed = adapters.KIND.find(name).PROPOSED
        if proposed:
            settings = {f"adapter.{key}": value for key, value in {"kind": name, **proposed}.items()}
            settings["parameters"] = "bf16"
            found.append(Change("an adapter", settings, FEW))
            found.append(Change("an adapter on a base in 4 bits (NF4)", {**settings, "adapter.base": "nf4"}, FEW))
    return found


@dataclass(frozen=True)
class Proposal:
    """A change with which the run fits."""

    change: Change
    planned: Planned
    """The fastest layout with it."""
    slower: float | None
    """Seconds of its step over those of the fastest layout of the run as it is, on GPUs with enough memory."""


def proposals(job: Job, cluster: ClusterConfig) -> Iterator[Proposal]:
    """Yield the changes with which a run fits; those that training refuses are left out.

    Args:
        job: the run, of which no layout fits.
        cluster: the cluster.
    """
    whole = fastest_of_any_size(job, cluster)
    for change in changes():
        try:
            changed = Job(_changed(job.config, change.settings), job.vocabulary_size, job.sequence_length,
                          job.techniques, job.teacher)
            ranking = rank(changed, cluster)
        except ConfigError:
            continue
        if ranking.fitting:
            first = ranking.fitting[0]
            yield Proposal(change, first, None if whole is None else first.time.seconds / whole.time.seconds)


def _changed(config: TrainConfig, settings: dict[str, Any]) -> TrainConfig:
    """Return a configuration with other settings.

    Raises:
        ConfigError: training refuses it, or it has these settings.
    """
    values = config.canonical()
    if "optimizer.kind" in settings:
        values["optimizer"] = {name: value for name, value in values.get("optimizer", {}).items()
                               if name in ("learning_rate", "weight_decay", "clip_norm")}
    changed: TrainConfig = build(TrainConfig, values, [f"{name}={value}" for name, value in settings.items()])
    if changed == config:
        raise ConfigError("nothing changes", where="plan", fix="propose something else")
    return changed
