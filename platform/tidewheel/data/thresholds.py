"""Thresholds of filters: the first failing rule gives the reason to drop a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

LEAST, MOST = 0, 1
"""Index of the limit of a statistic that a rule checks."""
Rule = tuple[str, int, str]
"""(statistic, LEAST or MOST, reason)."""


def first_failing(statistics: Mapping[str, np.ndarray], limits: Mapping[str, tuple[float | None, float | None]],
                  rules: Sequence[Rule]) -> list[str]:
    """Return for each document the reason of the first rule that it fails; "" if it fails none.

    Args:
        statistics: float64 [n] by name.
        limits: (smallest, largest) value that is kept, by statistic; a value equal to a limit is kept.
        rules: rules in order of precedence.
    """
    import numpy as np

    verdict = np.zeros(len(next(iter(statistics.values()))), np.int64)
    for rule in range(len(rules), 0, -1):  # backwards, so that the first failing rule overwrites later ones
        name, side, _ = rules[rule - 1]
        values = statistics[name]
        limit = limits[name][side]
        verdict[values < limit if side == LEAST else values > limit] = rule
    reasons = ("", *(reason for _, _, reason in rules))
    return [reasons[rule] for rule in verdict.tolist()]
