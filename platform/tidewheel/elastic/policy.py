"""Decisions about the number of workers and about failures, as plain objects: no Ray, no clock of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from tidewheel.elastic.layout import largest_fit


class HoldState(StrEnum):
    """How far a planned change is: nothing asked; workers asked to save and stop; they have, and wait."""

    NONE = "none"
    ASKED = "asked"
    HELD = "held"


class Move(StrEnum):
    """What to do now."""

    NOTHING = "nothing"
    ASK = "ask"
    RESIZE = "resize"
    CALL_OFF = "call_off"


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
    """Places for workers on usable nodes."""
    leaving: int
    """Workers on nodes that are being drained."""
    hold: HoldState
    stepped: bool
    """This generation has done a step."""


class Resizer:
    """Planned changes: the workers save at a step boundary and wait; only then is the group replaced.

    Joins are coalesced: growth waits until no more nodes came for `join_wait_seconds`. A drain does not wait.

    Args:
        sizes: legal numbers of workers.
        join_wait_seconds: quiet time before growing.
        interval_seconds: least time between two questions.
        patience_seconds: an answer that takes longer is no longer waited for.
    """

    def __init__(self, sizes: Iterable[int], *, join_wait_seconds: float, interval_seconds: float,
                 patience_seconds: float) -> None:
        self.sizes = tuple(sizes)
        self._join_wait, self._interval, self._patience = join_wait_seconds, interval_seconds, patience_seconds
        self._seen: tuple[int, float] | None = None  # places, since when
        self._asked_at = float("-inf")

    def decide(self, view: View) -> Decision:
        """The next move for a group that runs."""
        target = largest_fit(self.sizes, view.slots)
        wanted = target > 0 and (target > view.size or view.leaving > 0)
        if view.hold is HoldState.HELD:
            if wanted:
                return Decision(Move.RESIZE, target, "drain" if view.leaving else "join")
            return Decision(Move.CALL_OFF, view.size, "the nodes it was for are gone")
        if view.hold is HoldState.ASKED:
            if view.time - self._asked_at > self._patience:
                return Decision(Move.CALL_OFF, view.size, f"no answer for {self._patience:g} s")
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
        return self._ask(view, target, "join")

    def _ask(self, view: View, target: int, reason: str) -> Decision:
        if view.time - self._asked_at < 1.0:
            return NOTHING  # the question is on its way
        self._asked_at = view.time
        return Decision(Move.ASK, target, reason)


@dataclass
class FailureBudget:
    """How often a run may fail.

    Args:
        max_failures: in all; -1: any number.
        max_without_progress: in a row without one step further than ever before: a fault that restarting does not
            mend, such as a step that always runs out of memory.
    """

    max_failures: int = -1
    max_without_progress: int = 3
    failures: int = 0
    stuck: int = 0
    _furthest: int = -1

    def charge(self, furthest_step: int) -> bool:
        """One more failure, the furthest step ever done being `furthest_step`; True while there may be a retry."""
        self.failures += 1
        self.stuck = 1 if furthest_step > self._furthest else self.stuck + 1
        self._furthest = max(self._furthest, furthest_step)
        within = self.max_failures < 0 or self.failures <= self.max_failures
        return within and self.stuck <= self.max_without_progress
