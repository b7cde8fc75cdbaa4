"""Whether a run is faster without the node of a worker that is much slower than the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tidewheel.elastic.layout import largest_fit


@dataclass(frozen=True)
class SlowVerdict:
    """Whether to stop using the slow worker's node, and the reason."""

    leave: bool
    reason: str


def judge(policy: Literal["ignore", "report", "replace"], ratio: float, *, size: int, others: int,
          sizes: Iterable[int]) -> SlowVerdict:
    """Decide about a worker that takes `ratio` times as long for a step as the median.

    All workers wait for it, so a step takes `ratio` times as long; without it, the others share its work.

    Args:
        policy: the setting `elastic.slow_worker`.
        ratio: its time for a step, divided by the median.
        size: workers that train.
        others: available workers on other nodes, with or without a rank.
        sizes: legal numbers of workers.
    """
    if policy != "replace":
        return SlowVerdict(False, f"elastic.slow_worker is {policy}")
    rest = largest_fit(sizes, others)
    if not rest:
        return SlowVerdict(False, f"{others} other worker(s) are not a legal number")
    if rest < size and size / rest >= ratio:
        return SlowVerdict(False, f"{rest} instead of {size} workers would be slower still")
    return SlowVerdict(True, f"{rest} of {others} other worker(s) continue without it")
