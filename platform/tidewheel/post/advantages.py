"""From the rewards of a group to its advantages; `credit` has the kinds that look at tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

EPSILON = 1e-4
"""Added to a deviation before dividing by it, as in TRL."""


def advantages(rewards: Sequence[Sequence[float]], kind: str) -> list[list[float]]:
    """Return the advantage of each answer, computed in fp64.

    Args:
        rewards: of the answers of each group of a step.
        kind: `rollouts.advantage`, one whose advantages are of answers.
    """
    if kind == "reward":
        return [list(group) for group in rewards]
    return [_of_group(group, kind) for group in rewards]


def _of_group(rewards: Sequence[float], kind: str) -> list[float]:
    mean, deviation = _moments(rewards)
    if kind == "leave_one_out":
        total = math.fsum(rewards)
        return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]
    scale = deviation + EPSILON if kind == "group" else 1.0
    return [(reward - mean) / scale for reward in rewards]


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation (of a sample, n - 1)."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
