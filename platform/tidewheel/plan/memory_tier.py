"""Cost of the memory tier with one layout: how often it copies, the host memory and the network that it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tidewheel.plan.hardware import ClusterConfig
from tidewheel.plan.layout import Job, Layout

SLOTS, REPLICAS = 3, 2
"""Copies of a worker's state on its own node, and on another node (docs/checkpoints.md)."""
DISK_SLOTS = 1
"""Copies more on its own node with `checkpoint.local_disk`: one keeps its content while it is written to the disk."""


@dataclass(frozen=True)
class MemoryTierCost:
    """Cost of the memory tier, for a node whose GPUs all have a worker."""

    every_steps: int
    """Steps between two copies."""
    stall_seconds: float
    """Time to copy a GPU's part to host memory over its link. Most of it passes during the next step."""
    push_seconds: float
    """Time that a node's part is on the network; 0 without a second node or without replicas."""
    host_bytes: float
    """Host memory of a node."""
    network_bytes_per_second: float
    """What a node sends, averaged over the time between two copies; it receives as much."""


def memory_tier(job: Job, layout: Layout, cluster: ClusterConfig, step_seconds: float) -> MemoryTierCost | None:
    """Return the cost of the memory tier; None if the run has none.

    Args:
        job: the run.
        layout: its layout.
        cluster: the cluster.
        step_seconds: seconds of a step.
    """
    settings = job.config.checkpoint.memory_tier
    if settings.every_steps == 0:
        return None
    worker_bytes = state_bytes(job, layout)
    workers = min(cluster.nodes_of, cluster.gpus)
    replicated = settings.replica and cluster.gpus > cluster.nodes_of
    stall = worker_bytes / cluster.kind.host_link
    push = worker_bytes / cluster.kind.network if replicated else 0.0
    if settings.every_steps == "auto":
        every = max(1, math.ceil((stall + push) / (settings.share * step_seconds)))
    else:
        every = settings.every_steps
    sent = workers * worker_bytes / (every * step_seconds) if replicated else 0.0
    copies = SLOTS + (DISK_SLOTS if job.config.checkpoint.local_disk else 0) + (REPLICAS if replicated else 0)
    return MemoryTierCost(every, stall, push, workers * worker_bytes * copies, sent)


def state_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes of the state that a worker holds: parameters and optimizer state."""
    weights, optimizer = job.saved_parameters * job.saved_bytes, job.saved_parameters * job.optimizer_bytes
    pieces = layout.parallel.tensor * layout.parallel.pipeline
    if layout.sharded:
        return (weights + optimizer) / (pieces * layout.shards)
    ranks = layout.data * layout.parallel.context if layout.parallel.data == "zero1" else 1
    return (weights + optimizer / ranks) / pieces
