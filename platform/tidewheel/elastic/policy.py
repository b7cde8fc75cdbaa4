"""Decide on the number of workers and on recovery from failures, without Ray and clock."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from tidewheel.elastic.layout import largest_fit
from tidewheel.train.elastic_config import ElasticConfig

QUICK = 2
"""Number of consecutive failures without progress before the run pauses between attempts."""


class Move(StrEnum):
    """Next action on the number of workers."""

    NOTHING = "nothing"
    ASK = "ask"
    """Ask the members to leave at a step boundary."""
    CALL_OFF = "call_off"
    """Withdraw the request."""


class Recovery(StrEnum):
    """Kinds of recovery from a failure. Each one follows when the previous one did not help."""

    IN_PLACE = "in_place"
    """The next generation forms in the remaining processes."""
    KEPT = "kept"
    """Ray Train restarts its group of workers in the processes that still respond."""
    PLAIN = "plain"
    """Ray Train restarts its group of workers in new processes."""
    NONE = "none"
    """The run ends."""


@dataclass(frozen=True)
class Decision:
    """A move with its target number of workers and its reason."""

    move: Move
    size: int = 0
    reason: str = ""


NOTHING = Decision(Move.NOTHING)


@dataclass(frozen=True)
class View:
    """The state of a running generation."""

    time: float
    """Monotonic seconds."""
    size: int
    """Members of the generation."""
    slots: int
    """Workers that could have a rank: ready, and not about to leave."""
    leaving: int
    """Members that are about to leave."""
    asked: bool
    """The members were asked to leave, and have not left yet."""
    stepped: bool
    """The generation has done a step."""
    remaining_seconds: float = math.inf
    """Time until the run is over, at the current speed."""


class Resizer:
    """Decides on planned changes, in which the members save at a step boundary and leave, and a new generation forms.

    Joins are coalesced: growth waits until no worker has joined for `join_wait_seconds`. Growth must pay for itself:
    despite the pause, the run must do more work until the next expected change than without it. A drain does not wait.

    Args:
        sizes: legal numbers of workers.
        join_wait_seconds: quiet time before growth.
        interval_seconds: shortest time between two requests to leave.
        answer_seconds: a request that takes longer is called off.
        pause_seconds: cost of a change, until the first one is measured.
    """

    def __init__(self, sizes: Iterable[int], *, join_wait_seconds: float, interval_seconds: float,
                 answer_seconds: float, pause_seconds: float = 2.0) -> None:
        self.sizes = tuple(sizes)
        self.pause_seconds = pause_seconds
        self._join_wait = join_wait_seconds
        self._interval = interval_seconds
        self._answer = answer_seconds
        self._seen: tuple[int, float] | None = None  # number of slots, and since when
        self._asked_at = float("-inf")
        self._began: float | None = None
        self._losses = 0  # unplanned changes

    def took(self, seconds: float) -> None:
        """Note how long a planned change took, from the request to the first step."""
        self.pause_seconds = 0.5 * (self.pause_seconds + seconds)

    def shrunk(self) -> None:
        """Note that a generation ended because of a loss or a drain."""
        self._losses += 1

    def decide(self, view: View) -> Decision:
        """Return the next move for a running generation."""
        self._began = view.time if self._began is None else self._began
        target = largest_fit(self.sizes, view.slots)
        due = target > 0 and (target > view.size or view.leaving > 0)
        if view.asked:
            if not due:
                return Decision(Move.CALL_OFF, view.size, "the workers it was for are gone")
            if view.time - self._asked_at > self._answer:
                return Decision(Move.CALL_OFF, view.size, f"no answer for {self._answer:g} s")
            return NOTHING
        if not due or not view.stepped:
            self._seen = None
            return NOTHING
        if view.leaving:
            return self._ask(view, target, "drain")
        if self._seen is None or self._seen[0] != view.slots:
            self._seen = (view.slots, view.time)
        if view.time - self._seen[1] < self._join_wait or view.time - self._asked_at < self._interval:
            return NOTHING
        if not pays(view.size, target, self.pause_seconds, self._horizon(view)):
            return NOTHING
        return self._ask(view, target, "join")

    def _horizon(self, view: View) -> float:
        """Return the expected seconds until the next unplanned change, or until the run is over if that is sooner."""
        assert self._began is not None
        between = (view.time - self._began) / self._losses if self._losses else math.inf
        return min(between, view.remaining_seconds)

    def _ask(self, view: View, target: int, reason: str) -> Decision:
        if view.time - self._asked_at < 1.0:
            return NOTHING  # the last request is on its way
        self._asked_at = view.time
        return Decision(Move.ASK, target, reason)


def pays(size: int, target: int, pause_seconds: float, horizon_seconds: float) -> bool:
    """Return whether `target` workers after a pause do more work within the horizon than `size` workers without one.

    This assumes that throughput is proportional to the number of workers.

    Args:
        size: number of workers now.
        target: number of workers after the change.
        pause_seconds: duration of the change.
        horizon_seconds: time until the next change.
    """
    if math.isinf(horizon_seconds):
        return target > size
    return target * (horizon_seconds - pause_seconds) > size * horizon_seconds


@dataclass(frozen=True)
class Backoff:
    """Pauses that double, up to a bound."""

    first: float
    """Seconds of the first pause."""
    most: float
    """Seconds of the longest pause."""

    def seconds(self, times: int) -> float:
        """Return the pause after the `times`-th failure in a row; 0 for none."""
        if times < 1:
            return 0.0
        return min(self.most, self.first * 2.0 ** min(times - 1, 64))


@dataclass
class FailureBudget:
    """How often a run may fail, and how long it pauses after repeated failures.

    Args:
        max_failures: all failures; -1 for any number.
        max_without_progress: counted failures in a row without a step further than ever before; -1 for any number. A
            failure that a restart may not fix counts, such as a step that always runs out of memory. The loss of a
            worker or node does not count, nor does a failure for which a worker is left out.
        first: the first way to recover.
        backoff: pauses before an attempt, after more than `QUICK` failures in a row without progress.
    """

    max_failures: int = -1
    max_without_progress: int = 3
    first: Recovery = Recovery.IN_PLACE
    backoff: Backoff = Backoff(1.0, 60.0)
    failures: int = 0
    stuck: int = 0
    """Counted failures in a row without progress."""
    fruitless: int = 0
    """Failures of any cause in a row without progress. For a loss, any step is progress."""
    _furthest: int = -1
    _counted_at: int = -1

    def charge(self, furthest_step: int, *, counted: bool = True, stepped: bool = False) -> Recovery:
        """Note one more failure; return what it leads to.

        Args:
            furthest_step: the furthest step that the run has ever done.
            counted: see the class.
            stepped: the generation that failed did a step, perhaps one that the run had done before. After the loss of
                a node and of its copies in memory, many steps are repeated; further losses then say nothing about them.
        """
        self.failures += 1
        progress = furthest_step > self._furthest or (stepped and not counted)
        self.fruitless = 1 if progress else self.fruitless + 1
        self._furthest = max(self._furthest, furthest_step)
        if counted:
            self.stuck = 1 if furthest_step > self._counted_at else self.stuck + 1
            self._counted_at = max(self._counted_at, furthest_step)
        elif furthest_step > self._counted_at:
            self.stuck = 0
        if 0 <= self.max_failures < self.failures or 0 <= self.max_without_progress < self.stuck:
            return Recovery.NONE
        ways = [Recovery.IN_PLACE, Recovery.KEPT, Recovery.PLAIN]
        attempts = self.stuck if counted else 1
        return ways[min(ways.index(self.first) + attempts - 1, len(ways) - 1)]

    @property
    def pause(self) -> float:
        """Least seconds between the beginnings of the last attempt and the next."""
        return self.backoff.seconds(self.fruitless - QUICK)


def resizer_of(elastic: ElasticConfig, sizes: tuple[int, ...]) -> Resizer:
    """Return the resizer of a run.

    Args:
        elastic: its settings.
        sizes: legal numbers of workers.
    """
    return Resizer(sizes, join_wait_seconds=elastic.join_wait_seconds,
                   interval_seconds=elastic.resize_interval_seconds, answer_seconds=elastic.hold_seconds)


def budget_of(elastic: ElasticConfig) -> FailureBudget:
    """Return the budget of a run with these settings."""
    return FailureBudget(max_failures=elastic.max_failures,
                         max_without_progress=elastic.max_failures_without_progress,
                         first=Recovery(elastic.recovery),
                         backoff=Backoff(elastic.backoff_seconds, elastic.max_backoff_seconds))
