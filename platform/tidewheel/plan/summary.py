"""Cost of a whole run with one layout: checkpoints, goodput, tokens per day, GPU hours, money."""

from __future__ import annotations

from dataclasses import dataclass

from tidewheel.plan.config import TIERS, GoodputConfig, TierConfig
from tidewheel.plan.hardware import GB, ClusterConfig
from tidewheel.plan.layout import Job
from tidewheel.plan.layouts import Planned
from tidewheel.plan.memory_tier import MemoryTierCost, memory_tier
from tidewheel.plan.requests import Requests, requests

DAY = 86_400.0
INTERVALS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0)
"""Minutes between saves that are compared to find the best."""


@dataclass(frozen=True)
class Summary:
    """Cost of the whole run."""

    checkpoint_bytes: float
    save_stall_seconds: float
    """Time to copy each GPU's share to pinned host memory over its link."""
    upload_seconds: float
    """Time to upload a checkpoint to storage, in the background."""
    load_seconds: float
    interval_seconds: float
    """Time between saves, as configured."""
    goodput: float
    """Expected share of the time that failures and saves do not take (docs/goodput.md)."""
    best_interval_seconds: float
    best_goodput: float
    mtbf_seconds: float
    tokens_per_day: float
    """Tokens per day at that goodput."""
    tokens: int
    """Tokens of the whole run."""
    days: float
    gpu_hours: float
    cost: float | None
    memory_tier: MemoryTierCost | None
    """Cost of the memory tier; None without one."""
    requests: tuple[Requests, ...]
    """Requests to an object store per day."""


def summary(job: Job, planned: Planned, cluster: ClusterConfig) -> Summary:
    """Return the cost of the run with a layout. Simulates failures, with numpy.

    Args:
        job: the run.
        planned: the layout.
        cluster: the cluster.
    """
    from tidewheel.plan import recovery

    size = job.checkpoint_bytes
    seconds = planned.time.seconds
    stored = size / (cluster.storage_gbytes_per_gpu * GB * cluster.gpus)
    stall = size / cluster.gpus / cluster.kind.host_link
    in_memory = memory_tier(job, planned.layout, cluster, seconds)
    tier = _tier(job, in_memory, seconds, stall, stored)
    every = job.config.checkpoint.every_steps
    mtbf = cluster.failures.mtbf_seconds(cluster.gpus)
    if every == "auto":
        interval = recovery.young_daly(max(stall, 1e-3), mtbf)
    else:
        interval = float(every) * seconds if every else job.config.steps * seconds
    if job.config.checkpoint.every_seconds:
        interval = min(interval, job.config.checkpoint.every_seconds)
    rows = recovery.table(GoodputConfig(gpus=(cluster.gpus,), interval_minutes=(interval / 60, *INTERVALS),
                                        tiers={"as configured": tier}, failures=cluster.failures))
    own = rows[0]
    best = max(rows, key=lambda row: row.goodput)
    rate = planned.time.tokens_per_second * own.goodput
    from tidewheel.train.batch_size import BatchSizes

    tokens = BatchSizes.of(job.config.batch, job.sequence_length).total(job.config.steps) * job.sequence_length
    hours = tokens / rate / 3600 * cluster.gpus
    price = cluster.price_per_gpu_hour
    return Summary(size, stall, stored, stored, interval, own.goodput, best.interval_seconds, best.goodput, mtbf,
                   rate * DAY, tokens, tokens / rate / DAY, hours, None if price is None else hours * price,
                   in_memory, tuple(requests(job, cluster, seconds, size, interval)))


def _tier(job: Job, in_memory: MemoryTierCost | None, seconds: float, stall: float, stored: float) -> TierConfig:
    """Return the way to recover: measured detection and restart (`plan.config.TIERS`), and times computed from the size
    of the state."""
    checkpoint = job.config.checkpoint
    upload = stored if checkpoint.asynchronous else 0.0
    paused = stall if checkpoint.asynchronous else stall + stored
    if in_memory is None:
        return TIERS["restart from storage"].model_copy(update={
            "load_seconds": stored, "save_stall_seconds": paused, "upload_seconds": upload})
    base = TIERS["in place, memory tier"]
    from_storage = TIERS["restart from storage"].restart_seconds + stored
    return base.model_copy(update={
        "load_seconds": stall, "save_stall_seconds": paused, "upload_seconds": upload,
        "refresh_seconds": in_memory.every_steps * seconds, "refresh_stall_seconds": in_memory.stall_seconds,
        "storage_seconds": from_storage})
