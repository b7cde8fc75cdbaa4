"""The legal numbers of workers of a run, and the one that fits the present cluster."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from tidewheel.train.parallel.legal import legal_sizes, sizes

__all__ = ["largest_fit", "legal_sizes", "sizes", "slots"]


def largest_fit(sizes: Iterable[int], slots: int) -> int:
    """Return the largest of `sizes` that is at most `slots`; 0 if there is none."""
    return max((size for size in sizes if size <= slots), default=0)


def slots(nodes: Iterable[Mapping[str, float]], needs: Mapping[str, float]) -> int:
    """Return the number of workers that fit on the nodes; a worker never spans two nodes.

    Args:
        nodes: resources of each node, by Ray's names.
        needs: resources of one worker.
    """
    count = 0
    for offers in nodes:
        # 0.1 CPUs fit ten times into one CPU, despite rounding
        count += min(math.floor(offers.get(name, 0.0) / amount + 1e-6) for name, amount in needs.items())
    return count
