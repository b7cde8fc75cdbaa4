"""Settings for saving and keeping a run's state. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pydantic
from pydantic import Field

from tidewheel.config import Config


def _renamed(values: Any, former: str, name: str) -> Any:
    """Return `values` with the setting `former` under its present `name`.

    `run.json` of a run that an earlier release started has the former name. When both names are given, the later one
    wins, so that `--set` overrides a file.
    """
    if not isinstance(values, Mapping) or former not in values:
        return values
    renamed: dict[str, Any] = {}
    for key, value in values.items():
        key = name if key == former else key
        before = renamed.get(key)
        both_groups = isinstance(value, Mapping) and isinstance(before, Mapping)
        renamed[key] = {**before, **value} if both_groups else value  # type: ignore[dict-item]
    return renamed


def _checked_interval(value: int | str) -> int | str:
    if isinstance(value, int) and value < 0:
        raise ValueError(f"{value} steps is not an interval: give 0 or more, or auto")
    return value


class MemoryTierConfig(Config):
    """The newest states, kept in the memory of the nodes to recover at once from the loss of a worker or node."""

    every_steps: int | Literal["auto"] = "auto"
    """Copy the state to shared memory every this many steps; training then waits for the copy before if that is still
    on its way. auto: as often as `share` allows, and never while a copy is on its way. 0: never. A node needs free
    memory of five times the state of its workers. Without it the run goes on without the tier and records an event."""
    share: float = Field(default=0.02, gt=0, le=1)
    """For auto: the share of the time that copies may take, counting the time that training stands still for a copy and
    the time that the copy is on the network."""
    replica: bool = True
    """Keep a second copy on another node, so that the loss of a node loses nothing."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _accept_former_name(cls, values: Any) -> Any:
        return _renamed(values, "buddy", "replica")

    @pydantic.field_validator("every_steps")
    @classmethod
    def _not_negative(cls, value: int | str) -> int | str:
        return _checked_interval(value)


class LocalDiskConfig(Config):
    """Snapshots on the nodes' own disks: a run that is started again on the same machines continues from them, also
    when no process of it was left."""

    folder: str
    """Folder on the local disk of every node, such as /local_nvme. It must not be shared by several machines."""
    every_steps: int = Field(default=50, ge=1)
    """Write the state whenever this many more steps are done and the memory tier keeps it next."""
    limit_bytes: int = Field(default=0, ge=0)
    """Most bytes that a run has in this folder on one node. It needs twice the state of the node's workers, and for a
    moment one worker's part more. 0: as much as the disk has."""

    @pydantic.field_validator("folder")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if not value.startswith("/") or ".." in value.split("/"):
            raise ValueError(f"{value!r} is not an absolute path without '..': give the same folder on every node, "
                             "such as /local_nvme")
        return value


class CheckpointConfig(Config):
    """When to save, and how many checkpoints to keep."""

    every_steps: int | Literal["auto"] = 100
    """Save every this many steps, and at the end. 0: only at the end and before planned changes. auto: use the interval
    that loses the least time (Young/Daly), from the measured cost of a save and the measured failure rate."""
    every_seconds: float = Field(default=0.0, ge=0)
    """Also save when this many seconds have passed since the last save began; 0: do not."""
    expected_failure_seconds: float = Field(default=10_800.0, gt=0)
    """For auto: the time between failures until one has been measured. The default of three hours is what Llama 3 saw
    on 16,384 GPUs (arXiv 2407.21783, section 3.3.4)."""
    keep_last: int = Field(default=3, ge=1)
    """Keep this many of the newest checkpoints. Of older ones, `keep_best` and `keep_every` keep some, and the last one
    before the schedule's decay (`wsd`) is kept: a run with more steps continues from it. Others are deleted."""
    keep_best: int = Field(default=0, ge=0)
    """Also keep this many checkpoints with the lowest validation loss."""
    keep_every: int = Field(default=0, ge=0)
    """Also keep the checkpoints of steps that are multiples of this; 0: none."""
    asynchronous: bool = True
    """Upload in the background while training continues."""
    save_seconds: float = Field(default=1800.0, gt=0)
    """Give up a save that takes longer, report it as failed, and go on training. The default is the time that 900 GiB
    of one node take at 500 MB/s."""
    retry_seconds: float = Field(default=30.0, gt=0)
    """Retry this long after a failed save, whatever the interval."""
    max_failed_saves: int = Field(default=20, ge=0)
    """End the run after this many failed saves in a row; 0: never."""
    shared_reads: Literal["all", "node", "off"] = "all"
    """How workers that load a checkpoint from storage share its reads. all: each byte is read once and sent to the
    workers that need it. node: once for each node, for networks between nodes that are slower than storage. off: each
    worker reads what it needs."""
    memory_tier: MemoryTierConfig = MemoryTierConfig()
    """The memory tier, above storage."""
    local_disk: LocalDiskConfig | None = None
    """Snapshots on the nodes' disks, between memory and storage; default: none."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _accept_former_name(cls, values: Any) -> Any:
        return _renamed(values, "memory", "memory_tier")

    @pydantic.field_validator("every_steps")
    @classmethod
    def _not_negative(cls, value: int | str) -> int | str:
        return _checked_interval(value)

    @pydantic.model_validator(mode="after")
    def _disk_has_memory(self) -> CheckpointConfig:
        if self.local_disk is not None and self.memory_tier.every_steps == 0:
            raise ValueError("local_disk writes what the memory tier keeps, but memory_tier.every_steps is 0; nearest "
                             "legal choice: memory_tier.every_steps auto, or no local_disk")
        return self
