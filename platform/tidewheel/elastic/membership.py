"""Which workers form a generation, and when the next one is formed: a plain state machine without sockets or clock.

A worker is a process that can take a rank; one without a rank stands by. A generation runs until a member is lost or
fails, or until it is asked to make way for a planned change. Then every member leaves, whoever does not in time is
fenced, and those that are there form the next one in the same processes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tidewheel.elastic.admission import Admission
from tidewheel.elastic.blame import Blame, Fault, Judgement
from tidewheel.elastic.channel import RECONNECT_SECONDS
from tidewheel.elastic.generation import LEAVE_TIMES, ExitReason, Generation, Limits, Outbox, Phase, Worker, chosen
from tidewheel.elastic.layout import largest_fit
from tidewheel.elastic.policy import Backoff, FailureBudget, Move, Recovery, Resizer, View

__all__ = ["ExitReason", "Limits", "Membership", "Phase"]

ALONE = 10
"""While no worker gives a sign of life they may be silent for so many times the limit."""


class Membership:
    """See the module. Times are monotonic seconds.

    Args:
        sizes: legal numbers of workers.
        resizer: decides about growth and drains.
        budget: decides what a failure leads to.
        blame: decides whose a failure is.
        outbox: is told.
        first_generation: number of the first generation formed here.
        furthest_step: the furthest step ever done.
    """

    def __init__(self, sizes: Iterable[int], resizer: Resizer, budget: FailureBudget, outbox: Outbox, *,
                 limits: Limits, blame: Blame | None = None, first_generation: int = 0,
                 furthest_step: int = 0) -> None:
        self.sizes, self.phase = tuple(sizes), Phase.GATHERING
        self.generation: Generation | None = None
        self.workers: dict[str, Worker] = {}
        self.recovery = Recovery.IN_PLACE
        """What the last failure leads to."""
        self.remaining_seconds = float("inf")
        """Of the whole run, at the present speed."""
        self._last, self._saved = False, 0
        self._resizer, self._budget, self._outbox, self._limits = resizer, budget, outbox, limits
        blame = blame or Blame(Backoff(60.0, 3600.0))
        self._admission = Admission(self.sizes, blame, outbox, self.workers, limits.start)
        self._next, self._furthest = first_generation, furthest_step
        self._not_before = float("-inf")  # no generation is formed earlier: failures follow each other too fast
        self._gathering_since: float | None = None
        self._fresh = True  # no generation was formed of this group of workers
        self._draining: set[str] = set()
        self.avoided: set[str] = set()
        """Nodes that are left although they stay: too slow. Used again when nothing else is left."""
        self._ended: Generation | None = None  # the one before, until its successor has done a step
        self._ticked: float | None = None
        self._heard: float | None = None  # a sign of life of whichever worker

    @property
    def furthest_step(self) -> int:
        """The furthest step ever done."""
        return self._furthest

    # -- what is told ----------------------------------------------------------------------------
    def expect(self, names: Collection[str], now: float, *, anew: bool = False) -> None:
        """These workers are being started, a mapping has their nodes. `anew`: they are a new group, and nothing of the
        old one is left."""
        if anew:
            if self.generation is not None and self.generation.ended_at is None:
                self.generation.ended_at = now
            self._end_generation()
            for name in self.workers.keys() - set(names):
                del self.workers[name]
            self.phase, self._fresh, self._gathering_since = Phase.GATHERING, True, now
        nodes = names if isinstance(names, Mapping) else {}
        for name in names:
            self.workers.setdefault(name, Worker(name, nodes.get(name, "")))

    def hello(self, name: str, node: str, now: float, *, spot: bool = False, device: str = "") -> None:
        """A worker is ready for a rank."""
        worker = self.workers.setdefault(name, Worker(name))
        worker.node, worker.spot, worker.connected, worker.beat, worker.left = node, spot, True, now, None
        worker.device = device
        worker.cleared = not self._admission.blame.suspects(node, device, now)
        worker.leaving = node in self._draining or node in self.avoided
        if self.phase is Phase.OVER:
            self._outbox.send(name, {"do": "over"})
        self._gather(now)

    def beat(self, name: str, number: int, step: int, now: float, *, work: float = 0.0, aborts: int = -1) -> None:
        """A sign of life, and the last step the worker has done in generation `number`, 0 for none.

        Args:
            work: CPU seconds that its training thread has used.
            aborts: the newest generation whose end it has heard of.
        """
        if (worker := self.workers.get(name)) is None:
            return
        self._forgive(now)
        worker.beat, worker.aborts = now, max(worker.aborts, aborts)
        if work > worker.work:
            worker.work, worker.worked_at = work, now
        generation = self.generation
        if generation is not None and generation.number == number and step > generation.step:
            self._progress(generation, step, now)

    def _forgive(self, now: float) -> None:
        """A worker is heard. A time in which none was is not held against the others: this process was cut off."""
        silence = now - self._heard if self._heard is not None else 0.0
        self._heard = now
        if silence > 1.0:
            for worker in self.workers.values():
                worker.beat = now

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
        others = [each for each in self._admission.available() if each.node != worker.node]
        return worker, len(others)

    def lost(self, name: str, why: str, now: float) -> None:
        """The worker is gone."""
        worker = self.workers.pop(name, None)
        generation = self.generation
        if worker is None or generation is None or name not in generation.members:
            return
        if worker.left in (ExitReason.FINISHED, ExitReason.PREEMPTED):
            self._settle(now)
            return
        said = worker.text if worker.left is ExitReason.FAILED else ""  # a process that could not let go
        generation.lost[name] = said or why
        generation.loss_came_first = generation.loss_came_first or not generation.faults
        self._begin_end(now)

    def left(self, name: str, number: int, how: ExitReason, text: str, now: float, *, kind: str = "",
             accused: Collection[int] = ()) -> None:
        """A member has left generation `number`.

        Args:
            kind: class of the error that it raised by itself; "": it left because of others.
            accused: ranks that, it says, stand still.
        """
        worker, generation = self.workers.get(name), self.generation
        if worker is None or generation is None or generation.number != number or name not in generation.members:
            return
        worker.left, worker.text, worker.beat = how, text, now
        if kind or how is ExitReason.FATAL:
            self._note(generation, worker, kind or text.partition(":")[0], text, fatal=how is ExitReason.FATAL)
        for rank in accused:
            other = self.workers.get(generation.members[rank]) if 0 <= rank < len(generation.members) else None
            if other is not None:
                self._note(generation, other, "HangError", text, fatal=False)
        if how is ExitReason.PREEMPTED and text.isdigit():
            generation.step = self._saved = int(text)
        if how is not ExitReason.FINISHED:
            self._begin_end(now)
        self._settle(now)

    def probed(self, name: str, problem: str, now: float) -> None:
        """A worker has probed itself; `problem`: what is wrong, "" for nothing."""
        worker = self.workers.get(name)
        if worker is None or worker.probed_at is None:
            return
        worker.probed_at = None
        if problem:
            self._refuse(worker, f"its probe failed: {problem}", now)
            return
        self._admission.pass_(worker)
        self._gather(now)

    def raised(self, name: str, kind: str, text: str, now: float, *, fatal: bool) -> bool:
        """A worker's function ended by an error outside any generation: whether the run goes on without it."""
        worker, generation = self.workers.get(name), self.generation
        member = generation is not None and name in generation.members
        if worker is None or member or self.phase not in (Phase.GATHERING, Phase.RUNNING, Phase.ENDING):
            return False
        fault = Fault(name, worker.node, worker.device, kind, text, fatal, self._furthest)
        judgement = self._admission.blame.judge([fault], self._admission.spares(lambda other: not other.leaving), now)
        if judgement.out is None or judgement.final:
            return False
        self._admission.leave_out(judgement.cause, judgement.out)
        return True

    def nodes_out(self, now: float) -> set[str]:
        """Nodes on which no worker shall be started now: too slow, or to blame for failures."""
        return self.avoided | self._admission.blame.nodes_out(now)

    def stop_run(self) -> tuple[bool, int | None]:
        """The generation that trains shall save in storage and be the last; see `Coordinator.stop_run`."""
        if self.phase is Phase.STOPPED:
            return True, self._saved
        generation = self.generation
        trains = generation is not None and generation.step > 0 and self.phase in (Phase.RUNNING, Phase.ENDING)
        self._last = self._last or trains
        return trains or self._last, None

    def give_up(self, why: str) -> None:
        """End all training here: the run belongs to another driver."""
        self.phase, self.recovery = Phase.FAILED, Recovery.NONE
        generation = self.generation
        for name in self._still_in(generation) if generation is not None else ():
            self._outbox.send(name, {"do": "abort", "generation": generation.number if generation else -1})
        self._raise_all(why)

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
        for worker in self._admission.probe(now):
            self._refuse(worker, f"its probe did not end within {self._limits.start:g} s", now)
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
            # with no sign of life of any worker it is this process that is cut off; and nobody could go on without them
            newest = max(other.beat for other in self.workers.values() if other.connected)
            if newest - worker.beat < limit / 2 and silent < max(ALONE * limit, RECONNECT_SECONDS):
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
        there = self._admission.available()
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
        leave = self._limits.leave
        for name in self._still_in(generation):
            worker, since = self.workers[name], generation.ended_at
            if worker.aborts >= generation.number:  # it has heard, and what it does takes longer on a busy machine
                since = min(max(since, worker.worked_at), since + (LEAVE_TIMES - 1) * leave)
            if now - since >= leave:
                self._cut(name, f"did not leave within {now - generation.ended_at:.1f} s", now)

    # -- the end of a generation ---------------------------------------------------------------------
    def _begin_end(self, now: float) -> None:
        generation = self.generation
        assert generation is not None
        if self.phase is Phase.RUNNING:
            self.phase, generation.ended_at = Phase.ENDING, now
        failed = {name for name in generation.members if self._how(name) in (ExitReason.FAILED, ExitReason.FATAL)}
        if generation.lost or failed:
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
            if ways[generation.members[0]] is ExitReason.FINISHED:
                self.say_over()
                return
            generation.ended_at = now
        failed = bool(generation.lost or generation.faults) or ExitReason.FAILED in ways.values()
        if failed:
            self._recover(generation, now)
        elif generation.planned == "end":
            self.phase = Phase.STOPPED
        else:
            if generation.planned == "drain":
                self._resizer.shrunk()
            self._regather(now)

    def _recover(self, generation: Generation, now: float) -> None:
        """Answer a generation that failed."""
        judgement: Judgement | None = None
        if generation.faults and not generation.loss_came_first:
            spare = self._admission.spares(lambda worker: worker.available)
            judgement = self._admission.blame.judge(generation.faults, spare, now)
        if judgement is None:
            self.charge(counted=not generation.lost)
        elif judgement.final:
            self._resizer.shrunk()
            self.recovery = Recovery.NONE
        else:
            self.charge(counted=judgement.counted, in_place=judgement.out is not None)
        cause = self._failure(generation, judgement)
        if judgement is not None and judgement.out is not None and self.recovery is not Recovery.NONE:
            self._admission.leave_out(judgement.cause, judgement.out)
        if self.recovery is Recovery.IN_PLACE:
            self._not_before = now + self._budget.pause
            self._regather(now)
        elif self.recovery is not Recovery.NONE:
            self._raise_all(f"recovery in place is given up: {self.recovery}")
        elif judgement is not None and self._raised(judgement.cause):
            self._outbox.send(judgement.cause.worker, {"do": "raise", "text": ""})  # its own error ends the run
        else:
            self._raise_all(f"the run is given up: {cause}")

    def charge(self, *, counted: bool = True, in_place: bool = False) -> Recovery:
        """Note one more failure; return what it leads to.

        Args:
            counted: see `FailureBudget`.
            in_place: leaving somebody out is the remedy; nothing else need be tried.
        """
        self._resizer.shrunk()
        self.recovery = self._budget.charge(self._furthest, counted=counted)
        if in_place and self.recovery is not Recovery.NONE:
            self.recovery = self._budget.first
        return self.recovery

    def _failure(self, generation: Generation, judgement: Judgement | None) -> str:
        """Record it; return the cause."""
        self.phase = Phase.FAILED
        members = generation.members
        if judgement is not None:
            ranks, text = [members.index(judgement.cause.worker)], judgement.cause.text
        else:
            failed = [name for name in members if self._how(name) in (ExitReason.FAILED, ExitReason.FATAL)]
            texts = [*generation.lost.values(), *(self.workers[name].text for name in failed)]
            ranks, text = [members.index(name) for name in (generation.lost or failed)], texts[0] if texts else ""
        self._outbox.event("failure", {"generation": generation.number, "ranks": ranks, "step": generation.step,
                                       "error": text[:300], "recovery": str(self.recovery),
                                       "restart": self.recovery is not Recovery.NONE}, generation.ended_at)
        return text

    def _raised(self, cause: Fault) -> bool:
        """Whether the worker can raise it: it is there, and nobody else said it in its place."""
        worker = self.workers.get(cause.worker)
        return worker is not None and worker.text == cause.text

    def _regather(self, now: float) -> None:
        self.phase, self._gathering_since = Phase.GATHERING, now
        self._end_generation()
        self._gather(now)

    # -- blame -----------------------------------------------------------------------------------------
    def _note(self, generation: Generation, worker: Worker, kind: str, text: str, *, fatal: bool) -> None:
        generation.faults.append(
            Fault(worker.name, worker.node, worker.device, kind, text, fatal, self._furthest))

    def _refuse(self, worker: Worker, problem: str, now: float) -> None:
        """A worker did not pass its probe. If nobody else can train, that is a failure of the run."""
        nobody = not largest_fit(self.sizes, len(self._admission.available()))
        fault = Fault(worker.name, worker.node, worker.device, "probe", problem, False, self._furthest)
        self._admission.refuse(fault, now)
        if nobody and self.phase is Phase.GATHERING and self.charge() is Recovery.NONE:
            self.phase = Phase.FAILED
            self._raise_all(f"the run is given up: {problem}")

    def _end_generation(self) -> None:
        if self.generation is not None:
            self._ended, self.generation = self.generation, None

    # -- the next one ------------------------------------------------------------------------------
    def _gather(self, now: float) -> None:
        """Form a generation if it can be."""
        if self.phase is not Phase.GATHERING:
            return
        there = self._admission.available()
        starting = [worker for worker in self.workers.values() if not worker.connected]
        if self._gathering_since is None:
            self._gathering_since = now
        if now < self._not_before:
            return
        size = largest_fit(self.sizes, len(there))
        if not size and self.avoided:  # a slow worker is better than none
            for worker in self.workers.values():
                worker.leaving = worker.leaving and worker.node not in self.avoided - self._draining
            self.avoided.clear()
            there = self._admission.available()
            size = largest_fit(self.sizes, len(there))
        waited = now - self._gathering_since > self._limits.start / 4
        if not size and (waited or not starting):
            self._admission.blame.lift()  # and so is one that was to blame, if it passes a probe
        if not size:
            if now - self._gathering_since > self._limits.gather:
                self.phase, self.recovery = Phase.FAILED, Recovery.KEPT
                self._raise_all("too few workers")
            return
        if self._fresh and starting and size < max(self.sizes) \
                and now - self._gathering_since < self._limits.start:
            return
        ranked = chosen(there, size, self._ended.members if self._ended is not None else ())
        members = tuple(worker.name for worker in ranked)
        generation = Generation(self._next, members, now)
        self._next, self._fresh, self._gathering_since = self._next + 1, False, None
        self.generation, self.phase = generation, Phase.RUNNING
        ended = self._ended
        if ended is not None and ended.planned and not ended.lost:
            self._outbox.event("resize", {"generation": ended.number, "from": len(ended.members), "to": size,
                                          "reason": ended.planned, "step": ended.step})
        for worker in ranked:
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

    def _how(self, name: str) -> ExitReason | None:
        return self.workers[name].left if name in self.workers else None

    def _still_in(self, generation: Generation) -> list[str]:
        return [name for name in generation.members if name in self.workers and self.workers[name].left is None]

    def _tell(self, generation: Generation, message: dict[str, Any]) -> None:
        for name in generation.members:
            self._outbox.send(name, message)
