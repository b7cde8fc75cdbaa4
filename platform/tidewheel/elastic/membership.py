"""Which workers form a generation, and when the next one is formed: a plain state machine without sockets or clock.

A worker is a process that can take a rank; one without a rank stands by. A generation runs until a member is lost or
fails, or until it is asked to make way for a planned change. Then every member leaves, whoever does not in time is
fenced, and those that are there form the next one in the same processes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from tidewheel.elastic.layout import largest_fit
from tidewheel.elastic.policy import FailureBudget, Move, Recovery, Resizer, View

ALONE = 10
"""The only worker there is may be silent for so many times the limit."""


class Phase(StrEnum):
    """Workers gather; a generation runs; its members are told to leave; the run failed, was stopped early, or is
    over."""

    GATHERING = "gathering"
    RUNNING = "running"
    ENDING = "ending"
    FAILED = "failed"
    STOPPED = "stopped"
    OVER = "over"


class How(StrEnum):
    """How a worker left its generation."""

    FINISHED = "finished"
    MADE_WAY = "made_way"
    FAILED = "failed"
    """Of a broken collective or the like: starting again may mend it."""
    FATAL = "fatal"
    """Of something that starting again does not mend."""


class Outbox(Protocol):
    """Where decisions go."""

    def send(self, worker: str, message: dict[str, Any]) -> None:
        """Tell a worker."""

    def fence(self, worker: str) -> None:
        """Cut a worker off: its process ends itself when it notices, and Ray is asked to end it."""

    def event(self, kind: str, detail: dict[str, Any], at: float | None = None) -> None:
        """Record an event; `at` is monotonic."""

    def formed(self, generation: int, size: int) -> None:
        """A generation begins."""


@dataclass(frozen=True)
class Limits:
    """Seconds."""

    heartbeat: float = 3.0
    """A worker without a sign of life for this long, in a generation that does not get on, is lost."""
    leave: float = 5.0
    """Members that were told to leave have this long."""
    start: float = 60.0
    """The first generation of a group of workers waits this long for those that are still starting."""
    gather: float = 120.0
    """So long there may be too few workers; then Ray Train is asked to start anew."""


@dataclass
class Worker:
    """One worker as it is known here."""

    name: str
    node: str = ""
    connected: bool = False
    spot: bool = False
    """Its node may be taken away at any time."""
    leaving: bool = False
    """Its node is being drained, or it was asked to end."""
    beat: float = 0.0
    left: How | None = None
    """How it left the generation it is a member of."""
    text: str = ""


@dataclass
class Generation:
    """One group of ranks."""

    number: int
    members: tuple[str, ...]
    """Names in rank order."""
    began: float
    step: int = 0
    """Steps done when last heard of; 0: none in this generation."""
    stepped_at: float = 0.0
    ended_at: float | None = None
    """When the first sign of its end was seen."""
    lost: dict[str, str] = field(default_factory=dict)
    """Members that are gone, and why."""
    planned: str = ""
    """Reason of the change it was asked to make way for."""


class Membership:
    """See the module. Times are monotonic seconds.

    Args:
        sizes: legal numbers of workers.
        resizer: decides about growth and drains.
        budget: decides what a failure leads to.
        outbox: is told.
        first_generation: number of the first generation formed here.
        furthest_step: the furthest step ever done.
    """

    def __init__(self, sizes: Iterable[int], resizer: Resizer, budget: FailureBudget, outbox: Outbox, *,
                 limits: Limits, first_generation: int = 0, furthest_step: int = 0) -> None:
        self.sizes, self.phase = tuple(sizes), Phase.GATHERING
        self.generation: Generation | None = None
        self.workers: dict[str, Worker] = {}
        self.recovery = Recovery.IN_PLACE
        """What the last failure leads to."""
        self.remaining_seconds = float("inf")
        """Of the whole run, at the present speed."""
        self._last, self._saved = False, 0
        self._resizer, self._budget, self._outbox, self._limits = resizer, budget, outbox, limits
        self._next, self._furthest = first_generation, furthest_step
        self._gathering_since: float | None = None
        self._fresh = True  # no generation was formed of this group of workers
        self._draining: set[str] = set()
        self.avoided: set[str] = set()
        """Nodes that are left although they stay: too slow. Used again when nothing else is left."""
        self._ended: Generation | None = None  # the one before, until its successor has done a step
        self._ticked: float | None = None

    # -- what is told ----------------------------------------------------------------------------
    def expect(self, names: Collection[str], now: float, *, anew: bool = False) -> None:
        """These workers are being started. `anew`: they are a new group, and nothing of the old one is left."""
        if anew:
            if self.generation is not None and self.generation.ended_at is None:
                self.generation.ended_at = now
            self._end_generation()
            self.workers = {name: worker for name, worker in self.workers.items() if name in names}
            self.phase, self._fresh, self._gathering_since = Phase.GATHERING, True, now
        for name in names:
            self.workers.setdefault(name, Worker(name))

    def hello(self, name: str, node: str, now: float, *, spot: bool = False) -> None:
        """A worker is ready for a rank."""
        worker = self.workers.setdefault(name, Worker(name))
        worker.node, worker.spot, worker.connected, worker.beat, worker.left = node, spot, True, now, None
        worker.leaving = node in self._draining or node in self.avoided
        if self.phase is Phase.OVER:
            self._outbox.send(name, {"do": "over"})
        self._gather(now)

    def beat(self, name: str, number: int, step: int, now: float) -> None:
        """A sign of life, and the last step the worker has done in generation `number`, 0 for none."""
        if (worker := self.workers.get(name)) is None:
            return
        worker.beat = now
        generation = self.generation
        if generation is not None and generation.number == number and step > generation.step:
            self._progress(generation, step, now)

    def leaving(self, name: str) -> None:
        """The worker's process was asked to end."""
        if name in self.workers:
            self.workers[name].leaving = True

    def drain(self, nodes: Iterable[str]) -> None:
        """The nodes that are about to leave, all of them."""
        self._draining = set(nodes)
        for worker in self.workers.values():
            worker.leaving = worker.leaving or worker.node in self._draining

    def avoid(self, node: str) -> None:
        """Leave this node as if it were drained."""
        self.avoided.add(node)
        for worker in self.workers.values():
            worker.leaving = worker.leaving or worker.node == node

    def beside(self, rank: int) -> tuple[Worker, int] | None:
        """The worker that has `rank` now, and how many others could have one without its node; None: nobody has."""
        generation = self.generation
        if generation is None or self.phase is not Phase.RUNNING or rank >= len(generation.members):
            return None
        worker = self.workers.get(generation.members[rank])
        if worker is None:
            return None
        others = [each for each in self.workers.values()
                  if each.connected and not each.leaving and each.node != worker.node]
        return worker, len(others)

    def lost(self, name: str, why: str, now: float) -> None:
        """The worker is gone."""
        worker = self.workers.pop(name, None)
        generation = self.generation
        if worker is None or generation is None or name not in generation.members:
            return
        if worker.left in (How.FINISHED, How.MADE_WAY):
            self._settle(now)
            return
        generation.lost[name] = why
        self._begin_end(now)

    def left(self, name: str, number: int, how: How, text: str, now: float) -> None:
        """A member has left generation `number`."""
        worker, generation = self.workers.get(name), self.generation
        if worker is None or generation is None or generation.number != number or name not in generation.members:
            return
        worker.left, worker.text, worker.beat = how, text, now
        if how is How.MADE_WAY and text.isdigit():
            generation.step = self._saved = int(text)
        if how is not How.FINISHED:
            self._begin_end(now)
        self._settle(now)

    def stop_run(self) -> tuple[bool, int | None]:
        """The generation that trains shall save in storage and be the last; see `Coordinator.stop_run`."""
        if self.phase is Phase.STOPPED:
            return True, self._saved
        generation = self.generation
        trains = generation is not None and generation.step > 0 and self.phase in (Phase.RUNNING, Phase.ENDING)
        self._last = self._last or trains
        return trains or self._last, None

    def say_over(self) -> None:
        """Rank 0 has written the run's result: all may return."""
        self.phase = Phase.OVER
        for worker in self.workers.values():
            self._outbox.send(worker.name, {"do": "over"})

    # -- what time brings --------------------------------------------------------------------------
    def tick(self, now: float) -> None:
        """To be called several times a second."""
        late = now - self._ticked - 1.0 if self._ticked is not None else 0.0
        self._ticked = now
        if late > 0:  # this process itself stood still: signs of life are waiting to be read
            for worker in self.workers.values():
                worker.beat += late
        self._find_silent(now)
        if self.phase is Phase.RUNNING:
            self._consider(now)
        elif self.phase is Phase.ENDING:
            self._hurry(now)
        elif self.phase is Phase.GATHERING:
            self._gather(now)

    def _find_silent(self, now: float) -> None:
        generation = self.generation
        moved = max(generation.stepped_at, generation.began) if generation is not None else float("-inf")
        limit = self._limits.heartbeat
        for worker in list(self.workers.values()):
            silent = now - worker.beat
            if not worker.connected or silent < limit:
                continue
            others = [other for other in self.workers.values() if other.connected and other is not worker]
            if not others and silent < ALONE * limit:  # nobody waits for it, and nobody could go on without it
                continue
            member = generation is not None and worker.name in generation.members
            # the others cannot get on without a member that stands still; if they do, it is only late
            if member and now - moved < limit:
                continue
            self._cut(worker.name, f"no sign of life for {silent:.1f} s", now)

    def _consider(self, now: float) -> None:
        generation = self.generation
        assert generation is not None
        if self._last:
            if generation.step and generation.planned != "end":
                generation.planned = "end"
                self._tell(generation, {"do": "stop", "generation": generation.number, "save": True})
            return
        there = [worker for worker in self.workers.values() if worker.connected and not worker.leaving]
        view = View(time=now, size=len(generation.members), slots=len(there), stepped=generation.step > 0,
                    leaving=sum(self.workers[name].leaving for name in generation.members if name in self.workers),
                    asked=bool(generation.planned), remaining_seconds=self.remaining_seconds)
        decision = self._resizer.decide(view)
        if decision.move is Move.ASK:
            generation.planned = decision.reason
            self._outbox.event("resize_asked", {"generation": generation.number, "to": decision.size,
                                                "reason": decision.reason})
            self._tell(generation, {"do": "stop", "generation": generation.number})
        elif decision.move is Move.CALL_OFF:
            generation.planned = ""
            self._outbox.event("resize_called_off", {"generation": generation.number, "reason": decision.reason})
            self._tell(generation, {"do": "go_on", "generation": generation.number})

    def _hurry(self, now: float) -> None:
        generation = self.generation
        assert generation is not None
        assert generation.ended_at is not None
        if now - generation.ended_at < self._limits.leave:
            return
        for name in self._still_in(generation):
            self._cut(name, f"did not leave within {self._limits.leave:g} s", now)

    # -- the end of a generation ---------------------------------------------------------------------
    def _begin_end(self, now: float) -> None:
        generation = self.generation
        assert generation is not None
        if self.phase is Phase.RUNNING:
            self.phase, generation.ended_at = Phase.ENDING, now
        if generation.lost or any(self._how(name) in (How.FAILED, How.FATAL) for name in generation.members):
            for name in self._still_in(generation):
                self._outbox.send(name, {"do": "abort", "generation": generation.number})
        self._settle(now)

    def _settle(self, now: float) -> None:
        """If every member has left: what comes next."""
        generation = self.generation
        if generation is None or self.phase not in (Phase.RUNNING, Phase.ENDING) or self._still_in(generation):
            return
        ways = {name: self._how(name) for name in generation.members}
        if self.phase is Phase.RUNNING:  # all finished: the last word is rank 0's
            if ways[generation.members[0]] is How.FINISHED:
                self.say_over()
                return
            generation.ended_at = now
        fatal = [name for name, how in ways.items() if how is How.FATAL]
        if fatal and not generation.lost:
            self._failure(generation, Recovery.NONE)
            for name in fatal:
                self._outbox.send(name, {"do": "raise", "text": ""})
        elif not generation.lost and How.FAILED not in ways.values() and generation.planned == "end":
            self.phase = Phase.STOPPED
        elif not generation.lost and How.FAILED not in ways.values():
            if generation.planned == "drain":
                self._resizer.shrunk()
            self.phase, self._gathering_since = Phase.GATHERING, now
            self._end_generation()
            self._gather(now)
        else:
            self.charge()
            self._failure(generation, self.recovery)
            if self.recovery is Recovery.IN_PLACE:
                self.phase, self._gathering_since = Phase.GATHERING, now
                self._end_generation()
                self._gather(now)
            else:
                self._raise_all(f"recovery in place is given up: {self.recovery}")

    def charge(self) -> Recovery:
        """One more failure; what it leads to."""
        self._resizer.shrunk()
        self.recovery = self._budget.charge(self._furthest)
        return self.recovery

    def _failure(self, generation: Generation, recovery: Recovery) -> None:
        self.phase = Phase.FAILED
        failed = [name for name in generation.members if self._how(name) in (How.FAILED, How.FATAL)]
        texts = [*generation.lost.values(), *(self.workers[name].text for name in failed)]
        ranks = [generation.members.index(name) for name in (generation.lost or failed)]
        self._outbox.event("failure", {"generation": generation.number, "ranks": ranks, "step": generation.step,
                                       "error": texts[0][:300] if texts else "", "recovery": str(recovery),
                                       "restart": recovery is not Recovery.NONE}, generation.ended_at)

    def _end_generation(self) -> None:
        if self.generation is not None:
            self._ended, self.generation = self.generation, None

    # -- the next one ------------------------------------------------------------------------------
    def _gather(self, now: float) -> None:
        """Form a generation if it can be."""
        if self.phase is not Phase.GATHERING:
            return
        there = [worker for worker in self.workers.values() if worker.connected and not worker.leaving]
        starting = [worker for worker in self.workers.values() if not worker.connected]
        if self._gathering_since is None:
            self._gathering_since = now
        size = largest_fit(self.sizes, len(there))
        if not size and self.avoided:  # a slow worker is better than none
            for worker in self.workers.values():
                worker.leaving = worker.leaving and worker.node not in self.avoided - self._draining
            self.avoided.clear()
            there = [worker for worker in self.workers.values() if worker.connected and not worker.leaving]
            size = largest_fit(self.sizes, len(there))
        if not size:
            if now - self._gathering_since > self._limits.gather:
                self.phase, self.recovery = Phase.FAILED, Recovery.KEPT
                self._raise_all("too few workers")
            return
        if self._fresh and starting and size < max(self.sizes) \
                and now - self._gathering_since < self._limits.start:
            return
        chosen = _chosen(there, size, self._ended.members if self._ended is not None else ())
        members = tuple(worker.name for worker in chosen)
        generation = Generation(self._next, members, now)
        self._next, self._fresh, self._gathering_since = self._next + 1, False, None
        self.generation, self.phase = generation, Phase.RUNNING
        ended = self._ended
        if ended is not None and ended.planned and not ended.lost:
            self._outbox.event("resize", {"generation": ended.number, "from": len(ended.members), "to": size,
                                          "reason": ended.planned, "step": ended.step})
        for worker in chosen:
            worker.left, worker.beat = None, now
        self._outbox.formed(generation.number, size)
        for rank, name in enumerate(members):
            self._outbox.send(name, {"do": "join", "generation": generation.number, "rank": rank, "world_size": size})

    def _progress(self, generation: Generation, step: int, now: float) -> None:
        if not generation.step and self._ended is not None and self._ended.ended_at is not None:
            seconds = now - self._ended.ended_at
            self._outbox.event("recovered", {"generation": generation.number, "seconds": round(seconds, 3),
                                             "world_size": len(generation.members), "step": step})
            if self._ended.planned and not self._ended.lost:
                self._resizer.took(seconds)
            self._ended = None
        generation.step, generation.stepped_at = step, now
        self._furthest = max(self._furthest, step)

    def _raise_all(self, text: str) -> None:
        for worker in self.workers.values():
            self._outbox.send(worker.name, {"do": "raise", "text": text})

    # -- small things --------------------------------------------------------------------------------
    def _cut(self, name: str, why: str, now: float) -> None:
        self._outbox.fence(name)
        self.lost(name, why, now)

    def _how(self, name: str) -> How | None:
        return self.workers[name].left if name in self.workers else None

    def _still_in(self, generation: Generation) -> list[str]:
        return [name for name in generation.members if name in self.workers and self.workers[name].left is None]

    def _tell(self, generation: Generation, message: dict[str, Any]) -> None:
        for name in generation.members:
            self._outbox.send(name, message)


def _chosen(there: Sequence[Worker], size: int, before: Sequence[str]) -> list[Worker]:
    """`size` of those that are there, in rank order: those of the generation before first, in their order, but those
    of a node together, as neighbouring ranks talk most, and nodes that stay before spot nodes: rank 0, which writes
    the run's records, is on one of them whenever there is one."""
    known = {name: index for index, name in enumerate(before)}
    ranked = sorted(there, key=lambda worker: (known.get(worker.name, len(known)), worker.spot))
    chosen, others = ranked[:size], ranked[size:]
    if all(worker.spot for worker in chosen):
        chosen[-1:] = [worker for worker in others if not worker.spot][:1] or chosen[-1:]
    groups: dict[str, list[Worker]] = {}
    for worker in chosen:
        groups.setdefault(worker.node, []).append(worker)
    return [worker for group in sorted(groups.values(), key=lambda group: group[0].spot) for worker in group]
