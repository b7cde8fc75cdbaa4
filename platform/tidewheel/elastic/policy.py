"""Decisions about the number of workers and about failures, as plain objects: no Ray, no clock of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from tidewheel.elastic.layout import largest_fit

QUICK = 2
"""So many failures in a row without progress are answered at once."""


class Move(StrEnum):
    """What to do now."""

    NOTHING = "nothing"
    ASK = "ask"
    CALL_OFF = "call_off"


class Recovery(StrEnum):
    """What a failure leads to, each tried when the one before did not help."""

    IN_PLACE = "in_place"
    """The next generation is formed in the processes that are left."""
    KEPT = "kept"
    """Ray Train restarts its group of workers, in the processes that still answer."""
    PLAIN = "plain"
    """Ray Train restarts it in new processes."""
    NONE = "none"
    """The run is given up."""


@dataclass(frozen=True)
class Decision:
    """A move, the number of workers it leads to, and why."""

    move: Move
    size: int = 0
    reason: str = ""


NOTHING = Decision(Move.NOTHING)


@dataclass(frozen=True)
class View:
    """What a running group looks like now."""

    time: float
    """Monotonic seconds."""
    size: int
    """Workers that run."""
    slots: int
    """Workers that could have a rank: warm, and not about to leave."""
    leaving: int
    """Members that are about to leave."""
    asked: bool
    """The group was asked to make way, and has not yet."""
    stepped: bool
    """This generation has done a step."""
    remaining_seconds: float = math.inf
    """Until the run is over, at the present speed."""


class Resizer:
    """Planned changes: the workers save at a step boundary and leave, and the next generation is formed of those there.

    Joins are coalesced: growth waits until no more workers came for `join_wait_seconds`. It must pay: the work done in
    the time to the next expected change, less the pause, must be more than without it. A drain does not wait.

    Args:
        sizes: legal numbers of workers.
        join_wait_seconds: quiet time before growing.
        interval_seconds: least time between two questions.
        answer_seconds: an answer that takes longer is no longer waited for.
        pause_seconds: what a change costs, until the first was measured.
    """

    def __init__(self, sizes: Iterable[int], *, join_wait_seconds: float, interval_seconds: float,
                 answer_seconds: float, pause_seconds: float = 2.0) -> None:
        self.sizes, self.pause_seconds = tuple(sizes), pause_seconds
        self._join_wait, self._interval, self._answer = join_wait_seconds, interval_seconds, answer_seconds
        self._seen: tuple[int, float] | None = None  # places, since when
        self._asked_at = float("-inf")
        self._began: float | None = None
        self._losses = 0  # changes that nobody planned

    def took(self, seconds: float) -> None:
        """A planned change took so long, from the question to the first step."""
        self.pause_seconds = 0.5 * (self.pause_seconds + seconds)

    def shrunk(self) -> None:
        """A generation ended by a loss or a drain."""
        self._losses += 1

    def decide(self, view: View) -> Decision:
        """The next move for a group that runs."""
        self._began = view.time if self._began is None else self._began
        target = largest_fit(self.sizes, view.slots)
        wanted = target > 0 and (target > view.size or view.leaving > 0)
        if view.asked:
            if not wanted:
                return Decision(Move.CALL_OFF, view.size, "the workers it was for are gone")
            if view.time - self._asked_at > self._answer:
                return Decision(Move.CALL_OFF, view.size, f"no answer for {self._answer:g} s")
            return NOTHING
        if not wanted or not view.stepped:
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
        """Seconds until the next unplanned change, as often as there were any; at most until the run is over."""
        assert self._began is not None
        between = (view.time - self._began) / self._losses if self._losses else math.inf
        return min(between, view.remaining_seconds)

    def _ask(self, view: View, target: int, reason: str) -> Decision:
        if view.time - self._asked_at < 1.0:
            return NOTHING  # the question is on its way
        self._asked_at = view.time
        return Decision(Move.ASK, target, reason)


def pays(size: int, target: int, pause_seconds: float, horizon_seconds: float) -> bool:
    """Whether `target` workers after a pause do more within the horizon than `size` workers without one.

    Throughput is taken to grow with the number of workers.
    """
    if math.isinf(horizon_seconds):
        return target > size
    return target * (horizon_seconds - pause_seconds) > size * horizon_seconds


@dataclass(frozen=True)
class Backoff:
    """Pauses that double up to a bound."""

    first: float
    """Seconds of the first pause."""
    most: float
    """Seconds of the longest."""

    def seconds(self, times: int) -> float:
        """Return the pause after `times` times; 0 for none."""
        if times < 1:
            return 0.0
        return min(self.most, self.first * 2.0 ** min(times - 1, 64))


@dataclass
class FailureBudget:
    """How often a run may fail, and how long it pauses when it does so again and again.

    Args:
        max_failures: in all; -1: any number.
        max_without_progress: counted failures in a row without one step further than ever before; -1: any number.
            Counted is a fault that restarting does not fix, such as a step that always runs out of memory. The loss of
            a worker or node is not, nor is a fault for which one worker is left out.
        first: the way to recover that is tried first.
        backoff: pauses before a try, once as many failures in a row as `QUICK` brought no progress.
    """

    max_failures: int = -1
    max_without_progress: int = 3
    first: Recovery = Recovery.IN_PLACE
    backoff: Backoff = Backoff(1.0, 60.0)
    failures: int = 0
    stuck: int = 0
    """Counted failures in a row without progress."""
    fruitless: int = 0
    """Failures of any cause in a row without progress."""
    _furthest: int = -1
    _counted_at: int = -1

    def charge(self, furthest_step: int, *, counted: bool = True) -> Recovery:
        """Note one more failure, the furthest step ever done being `furthest_step`; return what it leads to."""
        self.failures += 1
        self.fruitless = 1 if furthest_step > self._furthest else self.fruitless + 1
        self._furthest = max(self._furthest, furthest_step)
        if counted:
            self.stuck = 1 if furthest_step > self._counted_at else self.stuck + 1
            self._counted_at = max(self._counted_at, furthest_step)
        elif furthest_step > self._counted_at:
            self.stuck = 0
        if 0 <= self.max_failures < self.failures or 0 <= self.max_without_progress < self.stuck:
            return Recovery.NONE
        ways = [Recovery.IN_PLACE, Recovery.KEPT, Recovery.PLAIN]
        tries = self.stuck if counted else 1
        return ways[min(ways.index(self.first) + tries - 1, 2)]

    @property
    def pause(self) -> float:
        """Seconds to wait before the next try."""
        return self.backoff.seconds(self.fruitless - QUICK)
