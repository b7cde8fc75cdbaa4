"""What filters with thresholds have in common: the first rule that fails gives the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

LEAST, MOST = 0, 1  # which of the two limits of a statistic a rule is about
Rule = tuple[str, int, str]
"""(statistic, LEAST or MOST, reason)."""


def first_failing(statistics: Mapping[str, np.ndarray], limits: Mapping[str, tuple[float | None, float | None]],
                  rules: Sequence[Rule]) -> list[str]:
    """The reason of the first rule that each document fails, "" = it fails none.

    Args:
        statistics: float64 [n] by name.
        limits: (smallest, largest) value that is kept, by statistic; a value equal to a limit is kept.
        rules: in the order in which they are tried.
    """
    import numpy as np

    verdict = np.zeros(len(next(iter(statistics.values()))), np.int64)
    for number in range(len(rules), 0, -1):  # backwards, so that the first failing rule is what stays
        name, side, _ = rules[number - 1]
        values, limit = statistics[name], limits[name][side]
        verdict[values < limit if side == LEAST else values > limit] = number
    reasons = ("", *(reason for _, _, reason in rules))
    return [reasons[number] for number in verdict.tolist()]
