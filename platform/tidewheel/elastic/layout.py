"""Which numbers of workers a run may have, and which one fits what is there now."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from tidewheel.train.parallel.legal import legal_sizes, sizes

__all__ = ["largest_fit", "legal_sizes", "sizes", "slots"]


def largest_fit(sizes: Iterable[int], slots: int) -> int:
    """The largest of `sizes` that `slots` places for workers allow; 0 when none does."""
    return max((size for size in sizes if size <= slots), default=0)


def slots(nodes: Iterable[Mapping[str, float]], needs: Mapping[str, float]) -> int:
    """Places for workers that need so much each, on nodes that offer so much (resources by Ray's names): a worker never
    spans two nodes."""
    return sum(min(math.floor(offers.get(name, 0.0) / amount + 1e-6)  # 0.1 CPUs go ten times into one
                   for name, amount in needs.items()) for offers in nodes)
