"""Settings of the simulator of failures and recoveries. Nothing here imports numpy or torch."""

from __future__ import annotations

import math
from typing import Any, Literal

import pydantic
from pydantic import Field

from tidewheel.config import Config

_NODE_DAYS = 1000 * 8 * 24
"""GPU hours of 1,000 node-days, at 8 GPUs a node."""
PER_GPU_HOUR = {
    "llama3": 419 / (54 * 24 * 16_384), "rsc1": 6.50 / _NODE_DAYS, "rsc2": 2.34 / _NODE_DAYS,
    "rsc1_1024": 1 / (7.9 * 1_024), "ft_hsdp": 2.3 / _NODE_DAYS}
"""Published failures per GPU and hour.

- llama3: 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv:2407.21783, section 3.3.4).
- rsc1, rsc2: 6.50 and 2.34 failures per 1,000 node-days on Meta's research clusters (arXiv:2410.21680).
- rsc1_1024: 7.9 hours to a failure, measured there for jobs of 1,024 GPUs: 3.7 times the rate of the whole cluster.
- ft_hsdp: 2.3 failures per 1,000 servers and day (arXiv:2602.00277). Its "every 18 minutes at 100K GPUs" would be 6.4.
"""


class FailureConfig(Config):
    """How often the run loses a node, and how."""

    rate: Literal["llama3", "rsc1", "rsc2", "rsc1_1024", "ft_hsdp"] | float = "rsc1"
    """A published rate, proportional to the GPUs (`PER_GPU_HOUR` has the sources): llama3: a failure every 3.1 h at
    16,384 GPUs; rsc1: 1.8 h; rsc2: 5.0 h; rsc1_1024: 0.5 h; ft_hsdp: 5.1 h; or a number: failures per GPU and hour."""
    several_share: float = Field(default=0.05, ge=0, le=1)
    """Share of the failures that take both a node and the node with its replica, as the loss of a rack would. This is
    an assumption: no figure is published."""

    @pydantic.field_validator("rate", mode="before")
    @classmethod
    def _one_point(cls, value: Any) -> Any:
        if value == "meta":
            raise ValueError("meta mixed two measurements: use rsc1 for the whole cluster, or rsc1_1024 for its jobs "
                             "of 1,024 GPUs")
        return value

    @pydantic.field_validator("rate")
    @classmethod
    def _positive(cls, value: str | float) -> str | float:
        if isinstance(value, float) and not (value > 0 and math.isfinite(value)):
            raise ValueError("use more than 0 failures per GPU and hour")
        return value

    def mtbf_seconds(self, gpus: int) -> float:
        """Return the mean time between failures of a run on `gpus` GPUs, in seconds."""
        rate = PER_GPU_HOUR[self.rate] if isinstance(self.rate, str) else self.rate
        return 3600 / (rate * gpus)


class TierConfig(Config):
    """One way to recover from a failure. All times are in seconds."""

    detect_seconds: float = Field(ge=0)
    """From the failure until it is detected."""
    restart_seconds: float = Field(ge=0)
    """From detection until all ranks have a process group again, without what `seconds_per_1000_ranks` adds."""
    load_seconds: float = Field(ge=0)
    """Time to load the newest state."""
    save_stall_seconds: float = Field(ge=0)
    """Time for which a save to storage stops training."""
    upload_seconds: float = Field(default=0.0, ge=0)
    """From the end of that stall until the checkpoint counts; the next save waits for it."""
    refresh_seconds: float = Field(default=0.0, ge=0)
    """Training time between refreshes of the replica in another node's memory; 0: there is no replica."""
    refresh_stall_seconds: float = Field(default=0.0, ge=0)
    """Time for which each refresh stops training."""
    storage_seconds: float = Field(default=0.0, ge=0)
    """With a replica in memory: recovery time after detection when that replica is lost as well."""
    new_processes_seconds: float = Field(default=72.0, ge=0)
    """Time from detection until new processes of all workers train, which recovery in place does without. The default
    is plain Ray Train's, measured by `tests/benchmarks/elastic.py`."""
    check_share: float = Field(default=0.0, ge=0, lt=1)
    """Time that the checks for silent corruption add to a step, as a share of it."""


TIERS: dict[str, TierConfig] = {
    "in place, memory tier": TierConfig(
        detect_seconds=1.5, restart_seconds=1.0, load_seconds=0.5, save_stall_seconds=0.05, upload_seconds=60,
        refresh_seconds=30, refresh_stall_seconds=0.05, storage_seconds=60),
    "restart from storage": TierConfig(
        detect_seconds=1.5, restart_seconds=10, load_seconds=30, save_stall_seconds=0.05, upload_seconds=60),
    "plain Ray Train": TierConfig(
        detect_seconds=2.0, restart_seconds=72, load_seconds=30, save_stall_seconds=1.0, upload_seconds=60)}
"""Detection, restarts and stalls are measured on a local cluster (docs/elastic.md). Loading and uploading are those of
a large run, 5 TB of state at 160 and 80 GB/s; give your own figures."""


class GoodputConfig(Config):
    """Settings of a goodput table: sizes of the run, intervals between checkpoints, ways to recover."""

    gpus: tuple[int, ...] = Field(default=(1_024, 2_048, 4_096, 8_192, 16_384), min_length=1)
    """Sizes of the run."""
    interval_minutes: tuple[float, ...] = Field(default=(1, 2, 5, 10, 20, 30, 60, 120, 240), min_length=1)
    """Training time between two saves to storage."""
    tiers: dict[str, TierConfig] = Field(default=TIERS, min_length=1)
    """Ways to recover, by name."""
    failures: FailureConfig = FailureConfig()
    """Failures of the run."""
    seconds_per_1000_ranks: float = Field(default=3.0, ge=0)
    """Seconds that a new process group takes longer per thousand ranks. MegaScale reports under 30 s at more than
    10,000 ranks (arXiv:2402.15627, section 3.5). Figures measured on a small cluster do not include it."""
    days: float = Field(default=54.0, gt=0)
    """Length of each simulated run; 54 as in Llama 3's statistics."""
    runs: int = Field(default=24, ge=2)
    """Failure traces for each size."""
    seed: int = Field(default=0, ge=0)
    """Seed of the traces, which all intervals and tiers share."""

    @pydantic.field_validator("gpus", "interval_minutes")
    @classmethod
    def _above_zero(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if any(item <= 0 for item in value):
            raise ValueError("every item must be more than 0")
        return value
