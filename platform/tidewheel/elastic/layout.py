"""Which numbers of workers a run may have, and which one fits what is there now."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tidewheel.train.parallel.legal import legal_sizes, sizes

__all__ = ["largest_fit", "legal_sizes", "sizes", "slots"]


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
