"""Whether a run is faster without the node of a worker that is much slower than the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from tidewheel.elastic.layout import largest_fit
from tidewheel.elastic.membership import Membership


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


def judged(detail: dict[str, Any], policy: Literal["ignore", "report", "replace"],
           membership: Membership) -> dict[str, Any]:
    """Decide about a slow worker; return its event with node, ratio, reason and action.

    Args:
        detail: the event of the worker that noticed it.
        policy: the setting `elastic.slow_worker`.
        membership: knows the workers, and is told to stop using the node.
    """
    slow = membership.worker_at(int(detail["slow_rank"]))
    generation = membership.generation
    if slow is None or generation is None:
        return detail
    worker, num_others = slow
    ratio = 1 + float(detail["over"])
    verdict = judge(policy, ratio, size=len(generation.members), others=num_others, sizes=membership.sizes)
    if verdict.leave:
        membership.avoid(worker.node)
    return {**detail, "node": worker.node, "ratio": round(ratio, 3), "reason": verdict.reason,
            "action": "replace" if verdict.leave else "report"}
