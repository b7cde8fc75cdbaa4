"""Choose the steps that are computed twice, and who computes them: pure functions, so that all workers agree."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

TRIED = 16
"""Shifts that are compared, so that the choice costs no more with many ranks."""


def is_sampled(seed: int, step: int, share: float) -> bool:
    """Return whether a step is computed twice.

    Of each 1 / share steps in a row one is, at a place that follows from the seed. So two of them are never more than
    2 / share steps apart, and no period of the run is in step with them.

    Args:
        seed: of the run.
        step: counts from 1.
        share: of the steps, above 0 up to 1.
    """
    period = max(1, round(1 / share))
    block, place = divmod(step - 1, period)
    return place == _drawn(seed, "step", block) % period


def shift(seed: int, step: int, nodes: Sequence[int], avoided: Sequence[int] = ()) -> int:
    """Return how many ranks further the data rank is whose micro-batches each data rank computes again.

    It is the one of a few drawn shifts that puts most micro-batches on another node; 0 without another rank.

    Args:
        seed: of the run.
        step: counts from 1.
        nodes: a number for the node of each data rank.
        avoided: shifts that were used already.
    """
    size = len(nodes)
    free = [other for other in range(1, min(size, TRIED + len(avoided) + 1)) if other not in avoided]
    if not free:
        return 0
    if size > TRIED:
        drawn = [1 + _drawn(seed, "shift", step, number) % (size - 1) for number in range(TRIED)]
        free = [other for other in drawn if other not in avoided] or free
    first = _drawn(seed, "first", step) % len(free)
    of_rank = np.asarray(nodes)
    moved = [int((of_rank != np.roll(of_rank, -other)).sum()) for other in (*free[first:], *free[:first])]
    return (*free[first:], *free[:first])[moved.index(max(moved))]


def _drawn(*key: int | str) -> int:
    text = " ".join(map(str, key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
