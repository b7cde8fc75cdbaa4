"""Which numbers of workers a run may have, and which one fits what is there now."""

from __future__ import annotations

import math
from collections.abc import Iterable


def legal_sizes(virtual_ranks: int, min_workers: int = 1, max_workers: int | None = None) -> tuple[int, ...]:
    """Worker counts from `min_workers` to `max_workers` that divide `virtual_ranks`, ascending.

    A count that divides gives every worker the same number of virtual ranks, and so the same micro-batches and
    the same global batch whatever the count.
    """
    most = virtual_ranks if max_workers is None else min(max_workers, virtual_ranks)
    return tuple(size for size in range(max(1, min_workers), most + 1) if virtual_ranks % size == 0)


def largest_fit(sizes: Iterable[int], slots: int) -> int:
    """The largest of `sizes` that `slots` places for workers allow; 0 when none does."""
    return max((size for size in sizes if size <= slots), default=0)


def slots(nodes: Iterable[tuple[float, float]], cpus_per_worker: float, gpus_per_worker: float = 0) -> int:
    """Places for workers on nodes given as (CPUs, GPUs): a worker never spans two nodes."""
    return sum(_slots_of_node(cpus, gpus, cpus_per_worker, gpus_per_worker) for cpus, gpus in nodes)


def _slots_of_node(cpus: float, gpus: float, cpus_per_worker: float, gpus_per_worker: float) -> int:
    places = cpus / cpus_per_worker
    if gpus_per_worker:
        places = min(places, gpus / gpus_per_worker)
    return math.floor(places + 1e-6)  # 0.1 CPUs go ten times into one
