"""How many spare nodes a run needs: a quantile of the number of nodes that are away at a time, which is binomial.

As ByteRobust sets its standby machines: by the 99th percentile of a binomial. A node is away from its failure until it
is replaced or repaired, so its chance to be away is 1 - exp(-rate x time).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tidewheel.plan.config import FailureConfig

GPUS_PER_NODE = 8
QUANTILE = 0.99


@dataclass(frozen=True)
class MeasuredRate:
    """Failures of nodes in real runs."""

    failures: int
    node_hours: float

    @property
    def per_node_hour(self) -> float:
        """Failures per node and hour. With none, what would give none in half of such runs: ln 2 / hours."""
        if not self.node_hours:
            return 0.0
        return (self.failures or math.log(2)) / self.node_hours


def binomial_quantile(count: int, chance: float, quantile: float) -> int:
    """Return the least k with P(X <= k) >= quantile for X binomial.

    Args:
        count: number of trials.
        chance: of each, 0 to 1.
        quantile: 0 to 1, exclusive.
    """
    if chance <= 0:
        return 0
    if chance >= 1:
        return count
    term = count * math.log1p(-chance)  # log P(X = 0)
    odds = math.log(chance) - math.log1p(-chance)
    total = 0.0
    for successes in range(count + 1):
        total += math.exp(term)
        if total >= quantile:
            return successes
        term += math.log(count - successes) - math.log(successes + 1) + odds if successes < count else 0.0
    return count


def spare_nodes(nodes: int, per_node_hour: float, replace_hours: float, quantile: float = QUANTILE) -> int:
    """Return the number of spare nodes that suffices with probability `quantile` at any time.

    Args:
        nodes: that the run needs.
        per_node_hour: failures.
        replace_hours: time until a failed node is replaced.
        quantile: 0 to 1, exclusive.
    """
    return binomial_quantile(nodes, -math.expm1(-per_node_hour * replace_hours), quantile)


def published_rate(failures: FailureConfig, nodes: int) -> float:
    """Return failures per node and hour of a run on `nodes` nodes of 8 GPUs.

    Args:
        failures: the rate.
        nodes: of the run.
    """
    return 3600 / failures.mtbf_seconds(nodes * GPUS_PER_NODE) / nodes


def measured_rate(runs: Sequence[str]) -> MeasuredRate:
    """Return how often nodes failed in real runs, by their events and time ledgers.

    Failures are those that `tidewheel explain` blames on nodes: no drains, stops and errors of the run.

    Args:
        runs: URIs.

    Raises:
        StorageError: one is no run.
    """
    from tidewheel.report.explain.account import account

    failures = 0
    seconds = 0.0
    for run in runs:
        told = account(run)
        failures += sum(item.times for item in told.causes if item.cause.blames_node)
        seconds += told.node_seconds
    return MeasuredRate(failures, seconds / 3600)
