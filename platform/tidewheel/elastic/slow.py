"""What to do about a worker that is much slower than the others: whether the run is faster without its node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tidewheel.elastic.layout import largest_fit


@dataclass(frozen=True)
class SlowVerdict:
    """Whether the slow worker's node is to be left, and why or why not."""

    leave: bool
    reason: str


def judge(policy: Literal["ignore", "report", "replace"], ratio: float, *, size: int, others: int,
          sizes: Iterable[int]) -> SlowVerdict:
    """Judge a worker that takes `ratio` times as long for a step as the median.

    All wait for it, so with it a step takes `ratio` times as long; without it the others share its work.

    Args:
        size: workers that train.
        others: workers that could, without those on the slow one's node, standing by or not.
        sizes: legal numbers of workers.
    """
    if policy != "replace":
        return SlowVerdict(False, f"elastic.slow_worker is {policy}")
    rest = largest_fit(sizes, others)
    if not rest:
        return SlowVerdict(False, f"{others} other worker(s) are no legal number")
    if rest < size and size / rest >= ratio:
        return SlowVerdict(False, f"{rest} instead of {size} workers would be slower still")
    return SlowVerdict(True, f"{rest} of {others} other worker(s) go on without it")
