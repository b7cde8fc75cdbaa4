"""What to change when no layout of a run fits, with the price in time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.plan.hardware import ClusterConfig
from tidewheel.plan.layout import Job
from tidewheel.plan.layouts import Planned, fastest_of_any_size, rank
from tidewheel.train.config import TrainConfig

LORA = {"adapter.kind": "lora", "adapter.rank": 64, "adapter.targets": "[attention, ffn]"}
"""Of QLoRA's appendix B.2 (arXiv:2305.14314), as in `jobs/configs/lora.yaml`."""
HOST = {"parallel.data": "zero3", "parallel.offload": "true"}
INPUTS = {"memory.activation_checkpointing": "offload"}
EIGHT_BIT = {"optimizer.kind": "adamw8bit"}
DISK = {"memory.optimizer_disk": "/local_nvme"}


@dataclass(frozen=True)
class Change:
    """Settings that take less memory on the GPUs."""

    what: str
    settings: dict[str, Any]
    trains: str
    """What is trained: the same, or something else."""


CHANGES = (
    Change("inputs of blocks in host memory", INPUTS, "the same"),
    Change("parameters, gradients and state in host memory", HOST, "the same"),
    Change("both", {**HOST, **INPUTS}, "the same"),
    Change("all, and the state on disk", {**HOST, **INPUTS, **DISK}, "the same"),
    Change("8-bit moments", {**EIGHT_BIT, **INPUTS}, "moments are rounded"),
    Change("8-bit moments in host memory", {**EIGHT_BIT, **HOST, **INPUTS}, "moments are rounded"),
    Change("an adapter", {**LORA, "parameters": "bf16"}, "1 % of the parameters"),
    Change("an adapter on a base in 4 bits (NF4)", {**LORA, "adapter.base": "nf4", "parameters": "bf16", **EIGHT_BIT},
           "1 % of the parameters"))
"""From what changes least to what changes most."""


@dataclass(frozen=True)
class Proposal:
    """A change with which the run fits."""

    change: Change
    planned: Planned
    """The fastest layout with it."""
    slower: float | None
    """Seconds of its step over those of the fastest layout of the run as it is, on GPUs with enough memory."""


def proposals(job: Job, cluster: ClusterConfig) -> Iterator[Proposal]:
    """Yield the changes of `CHANGES` with which a run fits; those that training refuses are left out.

    Args:
        job: the run, of which no layout fits.
        cluster: the cluster.
    """
    whole = fastest_of_any_size(job, cluster)
    for change in CHANGES:
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
