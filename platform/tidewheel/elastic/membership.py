"""Decide which workers form a generation and when the next one forms: a state machine without sockets and clock.

A worker is a process that can take a rank; a worker without a rank stands by. A generation runs until a member is lost
or fails, or until its members are asked to leave for a planned change. Then every member leaves, members that do not
leave in time are fenced, and the workers that remain form the next generation in the same processes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from tidewheel.elastic.admission import TEXT_CHARACTERS, Admission
from tidewheel.elastic.blame import Blame, Fault, Judgement, Level
from tidewheel.elastic.connection import RECONNECT_SECONDS
from tidewheel.elastic.generation import LEAVE_TIMES, Generation, Limits, Outbox, Phase, Worker
from tidewheel.elastic.layout import largest_fit
from tidewheel.elastic.messages import Abort, CoordinatorMessage, ExitReason, GoOn, Join, Left, Over, Raise, Stop
from tidewheel.elastic.node_health import NodeHealth
from tidewheel.elastic.policy import Backoff, FailureBudget, Move, Recovery, Resizer, View
from tidewheel.elastic.rank_order import choose, split_groups
from tidewheel.elastic.silence import Silence
from tidewheel.train.node_checks_config import NodeChecksConfig


class Membership:
    """The state machine. All times are monotonic seconds.

    Args:
        sizes: legal numbers of workers.
        resizer: decides on growth and drains.
        budget: decides how the run recovers from a failure.
        outbox: receives the decisions.
        limits: time limits.
        blame: decides which worker caused a failure; default: one that remembers failures for two hours.
        health: knows which nodes failed before; default: forgets with the run.
        first_generation: number of the first generation formed here.
        furthest_step: furthest step that the run has ever done.
    """

    def __init__(self, sizes: Iterable[int], resizer: Resizer, budget: FailureBudget, outbox: Outbox, *,
                 limits: Limits, blame: Blame | None = None, health: NodeHealth | None = None,
                 first_generation: int = 0, furthest_step: int = 0, tensor: int = 1, group: int = 0) -> None:
        self.sizes = tuple(sizes)
        self.phase = Phase.GATHERING
        self.generation: Generation | None = None
        self.workers: dict[str, Worker] = {}
        self.recovery = Recovery.IN_PLACE
        """How the run recovers from the last failure."""
        self.remaining_seconds = float("inf")
        """Time until the run is over, at the current speed."""
        self.avoided: set[str] = set()
        """Nodes that are too slow. The run uses them again when too few others are left."""
        self._resizer = resizer
        self._budget = budget
        self._outbox = outbox
        self._limits = limits
        self._admission = Admission(self.sizes, blame or Blame(Backoff(60.0, 3600.0)), outbox, self.workers,
                                    limits.start)
        self._health = health or NodeHealth(NodeChecksConfig(), outbox)
        self._largest_formed = 0
        self._awaited = ""  # a worker that had not connected when last looked for
        self._silence = Silence(self.workers, limits.heartbeat)
        self._tensor, self._group = tensor, group
        self.largest = max(self.sizes)
        """Most workers that a generation can have."""
        self._next = first_generation
        self._furthest = furthest_step
        self._is_last = False  # the run ends with this generation, as requested
        self._saved = 0
        self._not_before = float("-inf")  # form no generation earlier: failures follow each other too fast
        self._gathering_since: float | None = None
        self._fresh = True  # this group of workers has not formed a generation yet
        self._draining: set[str] = set()
        self._ended: Generation | None = None  # the previous one, until its successor has done a step

    @property
    def furthest_step(self) -> int:
        """The furthest step that the run has ever done."""
        return self._furthest

    # -- events ------------------------------------------------------------------------------------
    def expect(self, names: Collection[str], now: float, *, anew: bool = False) -> None:
        """Note workers that are being started.

        Args:
            names: names of the workers; a mapping names their nodes too.
            now: the time.
            anew: the workers are a new group, and the old group's workers no longer exist.
        """
        if anew:
            if self.generation is not None and self.generation.ended_at is None:
                self.generation.ended_at = now
            self._end_generation()
            for name in self.workers.keys() - set(names):
                del self.workers[name]
            self.phase = Phase.GATHERING
            self._fresh = True
            self._gathering_since = now
        nodes = names if isinstance(names, Mapping) else {}
        for name in names:
            self.workers.setdefault(name, Worker(name, nodes.get(name, "")))

    def hello(self, name: str, node: str, now: float, *, spot: bool = False, device: str = "", problem: str = "",
              ask: bool = False) -> None:
        """Note that a worker is ready for a rank.

        Args:
            name: its name.
            node: id of its node.
            now: the time.
            spot: the node may be taken away at any time.
            device: its GPUs, as the node numbers them; "" on CPU.
            problem: what its test before the start found; "" if it passed.
            ask: whether it must pass a probe first, because its clock seems wrong.
        """
        worker = self.workers.setdefault(name, Worker(name))
        worker.node = node
        worker.spot = spot
        worker.device = device
        worker.connected = True
        worker.beat = now
        worker.left = None
        worker.cleared = not (ask or self._admission.blame.suspects(node, device, now))
        worker.leaving = node in self._draining or node in self.avoided
        if self.phase is Phase.OVER:
            self._outbox.send(name, Over())
        elif problem:
            self._refuse(worker, f"its test at the start failed: {problem}", now, at_start=True)
            return
        self._gather(now)

    def beat(self, name: str, number: int, step: int, now: float, *, work: float = 0.0, aborts: int = -1) -> None:
        """Note a heartbeat.

        Args:
            name: the worker.
            number: number of its generation.
            step: last step that it has done in this generation; 0 before the first.
            now: the time.
            work: CPU seconds used by its training thread.
            aborts: newest generation that it knows was aborted.
        """
        worker = self.workers.get(name)
        if worker is None:
            return
        self._silence.heard(now)
        worker.beat = now
        worker.aborts = max(worker.aborts, aborts)
        if work > worker.work:
            worker.work = work
            worker.worked_at = now
        generation = self.generation
        if generation is not None and generation.number == number and step > generation.step:
            self._progress(generation, step, now)

    def leaving(self, name: str) -> None:
        """Note that a worker's process has received SIGTERM."""
        if name in self.workers:
            self.workers[name].leaving = True

    def drain(self, nodes: Iterable[str]) -> None:
        """Note all nodes that are about to leave."""
        self._draining = set(nodes)
        for worker in self.workers.values():
            worker.leaving = worker.leaving or worker.node in self._draining

    def avoid(self, node: str) -> None:
        """Stop using a node, as if it were drained."""
        self.avoided.add(node)
        for worker in self.workers.values():
            worker.leaving = worker.leaving or worker.node == node

    def worker_at(self, rank: int) -> tuple[Worker, int] | None:
        """Return the worker that has `rank`, and the number of available workers on other nodes; None without one."""
        generation = self.generation
        if generation is None or self.phase is not Phase.RUNNING or rank >= len(generation.members):
            return None
        worker = self.workers.get(generation.members[rank])
        if worker is None:
            return None
        others = [other for other in self._admission.available() if other.node != worker.node]
        return worker, len(others)

    def lost(self, name: str, why: str, now: float) -> None:
        """Note that a worker is gone.

        Args:
            name: the worker.
            why: cause of the failure, if the worker has not reported one itself.
            now: the time.
        """
        worker = self.workers.pop(name, None)
        generation = self.generation
        if worker is None or generation is None or name not in generation.ranks:
            return
        generation.remaining.pop(name, None)
        if worker.left in (ExitReason.FINISHED, ExitReason.PREEMPTED):
            self._settle(now)
            return
        if worker.leaving or worker.spot:
            generation.excused.add(worker.node)
        reported = worker.text if worker.left is ExitReason.FAILED else ""  # it ended itself after its report
        generation.lost[name] = reported or why
        generation.loss_came_first = generation.loss_came_first or not generation.faults
        self._begin_end(now)

    def left(self, name: str, message: Left, now: float) -> None:
        """Note that a member has left its generation.

        Args:
            name: the member.
            message: its report.
            now: the time.
        """
        worker = self.workers.get(name)
        generation = self.generation
        if worker is None or generation is None or generation.number != message.generation:
            return
        if name not in generation.ranks:
            return
        generation.remaining.pop(name, None)
        if message.reason in (ExitReason.FAILED, ExitReason.FATAL):
            generation.failed.append(name)
        fatal = message.reason is ExitReason.FATAL
        worker.left = message.reason
        worker.text = message.text
        worker.beat = now
        if message.error_kind or fatal:
            kind = message.error_kind or message.text.partition(":")[0]
            self._note(generation, worker, kind, message.text, fatal=fatal)
        for rank in message.accused:
            accused = self.workers.get(generation.members[rank]) if 0 <= rank < len(generation.members) else None
            if accused is not None:
                self._note(generation, accused, message.text.partition(":")[0], message.text, fatal=False)
        if message.saved_step is not None:
            self._saved = message.saved_step
            generation.step = message.saved_step
        if message.reason is not ExitReason.FINISHED:
            self._begin_end(now)
        self._settle(now)

    def probed(self, name: str, problem: str, now: float) -> None:
        """Note the result of a worker's probe.

        Args:
            name: the worker.
            problem: what is wrong; "" if it passed.
            now: the time.
        """
        worker = self.workers.get(name)
        if worker is None or worker.probed_at is None:
            return
        worker.probed_at = None
        if problem:
            self._refuse(worker, f"its probe failed: {problem}", now)
            return
        self._admission.readmit(worker)
        self._gather(now)

    def raised(self, name: str, kind: str, text: str, now: float, *, fatal: bool) -> bool:
        """Return whether the run continues without a worker whose function raised an error outside any generation.

        Args:
            name: the worker.
            kind: class of the error.
            text: its message.
            now: the time.
            fatal: a restart does not fix it.
        """
        worker = self.workers.get(name)
        is_member = self.generation is not None and name in self.generation.ranks
        if worker is None or is_member or self.phase not in (Phase.GATHERING, Phase.RUNNING, Phase.ENDING):
            return False
        fault = Fault(name, worker.node, worker.device, kind, text, fatal, self._furthest)
        judgement = self._admission.blame.judge([fault], self._admission.spares(lambda other: not other.leaving), now)
        if judgement.out is None or judgement.final:
            return False
        self._admission.leave_out(judgement.cause, judgement.out)
        return True

    def nodes_out(self, now: float) -> set[str]:
        """Return the nodes on which no worker may be started now: too slow, or blamed for failures."""
        return self.avoided | self._admission.blame.nodes_out(now)

    def stop_run(self) -> tuple[bool, int | None]:
        """Let the current generation save to storage and be the last one; see `Coordinator.stop_run`."""
        if self.phase is Phase.STOPPED:
            return True, self._saved
        generation = self.generation
        trains = generation is not None and generation.step > 0 and self.phase in (Phase.RUNNING, Phase.ENDING)
        self._is_last = self._is_last or trains
        return self._is_last, None

    def give_up(self, why: str) -> None:
        """End all training here: another driver owns the run."""
        self.phase = Phase.FAILED
        self.recovery = Recovery.NONE
        if self.generation is not None:
            self._abort(self.generation)
        self._raise_all(why)

    def finish(self) -> None:
        """Let all workers return: rank 0 has written the run's result."""
        self.phase = Phase.OVER
        for worker in self.workers.values():
            self._outbox.send(worker.name, Over())

    # -- time --------------------------------------------------------------------------------------
    def tick(self, now: float) -> None:
        """Act on the time; call it several times a second."""
        for worker in self._silence.find(self.generation, now):
            self._cut(worker.name, f"no sign of life for {now - worker.beat:.1f} s", now)
        for worker in self._admission.probe(now):
            self._refuse(worker, f"its probe did not end within {self._limits.start:g} s", now)
        if self.phase is Phase.RUNNING:
            self._cut_deaf(now)
        if self.phase is Phase.RUNNING:
            self._consider(now)
        elif self.phase is Phase.ENDING:
            self._cut_late(now)
        elif self.phase is Phase.GATHERING:
            self._gather(now)

    def _consider(self, now: float) -> None:
        """Ask the members to leave if a change is due, or call that off."""
        generation = self.generation
        assert generation is not None
        if self._is_last:
            if generation.step and generation.planned != "end":
                generation.planned = "end"
                self._tell(generation, Stop(generation.number, save=True))
            return
        leaving = [name for name in generation.members if name in self.workers and self.workers[name].leaving]
        decision = self._resizer.decide(View(
            time=now, size=len(generation.members), slots=len(self._usable()), leaving=len(leaving),
            stepped=generation.step > 0, asked=bool(generation.planned), remaining_seconds=self.remaining_seconds))
        if decision.move is Move.ASK:
            generation.planned = decision.reason
            self._outbox.event("resize_asked", {"generation": generation.number, "to": decision.size,
                                                "reason": decision.reason})
            self._tell(generation, Stop(generation.number))
        elif decision.move is Move.CALL_OFF:
            generation.planned = ""
            self._outbox.event("resize_called_off", {"generation": generation.number, "reason": decision.reason})
            self._tell(generation, GoOn(generation.number))

    def _cut_deaf(self, now: float) -> None:
        """Cut off members that do not hear the coordinator while the others wait for them."""
        generation = self.generation
        assert generation is not None
        limit = max(self._limits.leave, self._limits.heartbeat)  # heartbeats carry the acknowledgements
        if now - max(generation.stepped_at, generation.began) < limit:
            return
        unheard = {name: self._outbox.unheard(name) for name in generation.remaining}
        deaf = [name for name, seconds in unheard.items() if seconds >= limit]
        if len(deaf) == len(unheard):  # more likely than not nobody hears the coordinator
            deaf = [name for name in deaf if unheard[name] >= max(limit, RECONNECT_SECONDS)]
        for name in deaf:
            self._cut(name, f"has acknowledged no message for {unheard[name]:.1f} s", now)

    def _cut_late(self, now: float) -> None:
        """Cut off members that do not leave in time."""
        generation = self.generation
        assert generation is not None
        assert generation.ended_at is not None
        leave = self._limits.leave
        for name in list(generation.remaining):
            worker = self.workers[name]
            since = generation.ended_at
            if worker.aborts >= generation.number:  # it knows, and leaving takes longer on a busy machine
                since = min(max(since, worker.worked_at), since + (LEAVE_TIMES - 1) * leave)
            if now - since >= leave:
                self._cut(name, f"did not leave within {now - generation.ended_at:.1f} s", now)

    # -- the end of a generation -------------------------------------------------------------------
    def _begin_end(self, now: float) -> None:
        generation = self.generation
        assert generation is not None
        if self.phase is Phase.RUNNING:
            self.phase = Phase.ENDING
            generation.ended_at = now
        if generation.lost or generation.failed:
            self._abort(generation)
        self._settle(now)

    def _settle(self, now: float) -> None:
        """Decide how to continue once every member has left."""
        generation = self.generation
        if generation is None or self.phase not in (Phase.RUNNING, Phase.ENDING) or generation.remaining:
            return
        if self.phase is Phase.RUNNING:  # all have finished; only rank 0 writes the result
            if self._exit_reason(generation.members[0]) is ExitReason.FINISHED:
                self.finish()
                return
            generation.ended_at = now
        reasons = [self._exit_reason(name) for name in generation.members]
        if generation.lost or generation.faults or ExitReason.FAILED in reasons:
            self._recover(generation, now)
        elif generation.planned == "end":
            self.phase = Phase.STOPPED
            self._outbox.event("stopped", {"generation": generation.number, "step": generation.step})
        else:
            if generation.planned == "drain":
                self._resizer.shrunk()
            self._regather(now)

    def _recover(self, generation: Generation, now: float) -> None:
        """Respond to a generation that failed."""
        judgement: Judgement | None = None
        if generation.faults and not generation.loss_came_first:
            spare = self._admission.spares(lambda worker: worker.available)
            judgement = self._admission.blame.judge(generation.faults, spare, now)
        if judgement is None:
            self.charge(counted=not generation.lost, stepped=generation.step > 0)
        elif judgement.final:
            self._resizer.shrunk()
            self.recovery = Recovery.NONE
        else:
            self.charge(counted=judgement.counted, in_place=judgement.out is not None)
        cause = self._record_failure(generation, judgement)
        if judgement is not None and judgement.out is not None and self.recovery is not Recovery.NONE:
            self._health.failed(judgement.cause.node, judgement.cause.text)
            self._admission.leave_out(judgement.cause, judgement.out)
        if self.recovery is Recovery.IN_PLACE:
            self._not_before = generation.began + self._budget.pause  # a generation that lasted is no quick repetition
            self._regather(now)
        elif self.recovery is not Recovery.NONE:
            self._raise_all(f"in-place recovery has failed: {self.recovery}")
        elif judgement is not None and self._can_raise(judgement.cause):
            self._outbox.send(judgement.cause.worker, Raise())
        else:
            self._raise_all(f"the run has failed: {cause}")

    def charge(self, *, counted: bool = True, in_place: bool = False, stepped: bool = False) -> Recovery:
        """Note one more failure; return how to recover from it.

        Args:
            counted: see `FailureBudget`.
            stepped: the generation did a step.
            in_place: a worker is left out, so recovery starts again with the first kind.
        """
        self._resizer.shrunk()
        self.recovery = self._budget.charge(self._furthest, counted=counted, stepped=stepped)
        if in_place and self.recovery is not Recovery.NONE:
            self.recovery = self._budget.first
        return self.recovery

    def _record_failure(self, generation: Generation, judgement: Judgement | None) -> str:
        """Record the failure of a generation; return its cause."""
        self.phase = Phase.FAILED
        if judgement is not None:
            workers = [judgement.cause.worker]
            cause = judgement.cause.text
        else:
            failed = [name for name in generation.failed if name in self.workers]
            workers = list(generation.lost or failed)
            texts = [*generation.lost.values(), *(self.workers[name].text for name in failed)]
            cause = texts[0] if texts else ""
            self._health.lost([generation.nodes.get(name, "") for name in generation.lost], generation.excused,
                              generation.nodes.values(), cause)
        ranks = [generation.ranks[name] for name in workers]
        nodes = [generation.nodes.get(name, "") for name in workers]
        self._outbox.event("failure", {"generation": generation.number, "ranks": ranks, "nodes": nodes,
                                       "step": generation.step,
                                       "error": cause[:TEXT_CHARACTERS], "recovery": str(self.recovery),
                                       "restart": self.recovery is not Recovery.NONE}, generation.ended_at)
        return cause

    def _can_raise(self, cause: Fault) -> bool:
        """Return whether the fault's worker still exists and raised the error itself."""
        worker = self.workers.get(cause.worker)
        return worker is not None and worker.text == cause.text

    def _regather(self, now: float) -> None:
        self.phase = Phase.GATHERING
        self._gathering_since = now
        self._end_generation()
        self._gather(now)

    # -- blame -------------------------------------------------------------------------------------
    def _note(self, generation: Generation, worker: Worker, kind: str, text: str, *, fatal: bool) -> None:
        generation.faults.append(
            Fault(worker.name, worker.node, worker.device, kind, text, fatal, self._furthest))

    def _refuse(self, worker: Worker, problem: str, now: float, *, at_start: bool = False) -> None:
        """Leave out a worker that did not pass its probe. Without enough others, this is a failure of the run."""
        worker.cleared = False
        starting = [other for other in self.workers.values() if not other.connected]
        awaited = len(starting) if at_start else 0  # they may be enough
        too_few = not largest_fit(self.sizes, len(self._admission.available()) + awaited)
        fault = Fault(worker.name, worker.node, worker.device, "probe", problem, False, self._furthest)
        self._health.failed(worker.node, problem)
        if too_few and self.phase is Phase.GATHERING and self.charge() is Recovery.NONE:
            self.phase = Phase.FAILED
            self._outbox.event("failure", {"generation": self._next - 1, "ranks": [], "nodes": [worker.node],
                                           "step": self._furthest, "error": problem[:TEXT_CHARACTERS],
                                           "recovery": str(self.recovery), "restart": False})
            self._raise_all(f"the run has failed: {problem}")
            return
        level = Level.PROCESS
        if at_start:  # the next process there would fail as well
            level = Level.DEVICE if worker.device else Level.NODE
        self._admission.refuse(fault, now, level)

    def _end_generation(self) -> None:
        if self.generation is not None:
            self._ended = self.generation
            self.generation = None

    # -- the next generation -----------------------------------------------------------------------
    def _gather(self, now: float) -> None:
        """Form a generation if possible."""
        if self.phase is not Phase.GATHERING:
            return
        starting = self._is_starting()
        if self._gathering_since is None:
            self._gathering_since = now
        if now < self._not_before:
            return
        waited = now - self._gathering_since
        waits = self._fresh and starting and waited < self._limits.start
        if waits and len(self.workers) <= self.largest:
            return  # one less is available, at least
        available = self._usable()
        size = largest_fit(self.sizes, len(available))
        if not size and self.avoided:  # a slow worker is better than none
            self._use_avoided()
            available = self._usable()
            size = largest_fit(self.sizes, len(available))
        if not size:
            if waited > self._limits.start / 4 or not starting:
                self._admission.blame.lift()  # a blamed worker that passes a probe is better than none, too
            if waited > self._limits.gather:
                self.phase = Phase.FAILED
                self.recovery = Recovery.KEPT
                self._raise_all("too few workers")
            return
        if waits and (size < self.largest or self._health.doubts(worker.node for worker in available)):
            return
        previous = self._ended.members if self._ended is not None else ()
        self._form(choose(available, size, previous, self._tensor, self._group), now)

    def _is_starting(self) -> bool:
        """Return whether some worker has not connected yet. Each of thousands that connect asks."""
        awaited = self.workers.get(self._awaited)
        if awaited is None or awaited.connected:
            late = (worker.name for worker in reversed(self.workers.values()) if not worker.connected)
            self._awaited = next(late, "")
        return bool(self._awaited)

    def _usable(self) -> list[Worker]:
        """Return the workers that can take a rank, without those of nodes that failed again and again."""
        return self._health.usable(self._admission.available(), self.sizes, self._largest_formed)

    def _use_avoided(self) -> None:
        for worker in self.workers.values():
            worker.leaving = worker.leaving and worker.node not in self.avoided - self._draining
        self.avoided.clear()

    def _form(self, ranked: list[Worker], now: float) -> None:
        generation = Generation(self._next, tuple(worker.name for worker in ranked), now,
                                nodes={worker.name: worker.node for worker in ranked})
        self._next += 1
        self._largest_formed = max(self._largest_formed, len(ranked))
        self._fresh = False
        self._gathering_since = None
        self.generation = generation
        self.phase = Phase.RUNNING
        ended = self._ended
        if ended is not None and ended.planned and not ended.lost:
            self._outbox.event("resize", {"generation": ended.number, "from": len(ended.members), "to": len(ranked),
                                          "reason": ended.planned, "step": ended.step})
        for worker in ranked:
            worker.left = None
            worker.beat = now
        if split := split_groups(ranked, self._tensor):
            nodes = sorted({worker.node for group in split for worker in group})
            self._outbox.event("tensor_groups_split", {
                "generation": generation.number, "groups": len(split), "of": len(ranked) // self._tensor,
                "tensor": self._tensor, "nodes": nodes})
        self._outbox.formed(generation.number, len(ranked))
        for rank, name in enumerate(generation.members):
            self._outbox.send(name, Join(generation.number, rank, len(ranked)))
        if len(ranked) == self.largest:
            self._end_replaced(generation, now)

    def _end_replaced(self, generation: Generation, now: float) -> None:
        """End workers of nodes that are not used now, whose substitutes have come up.

        They would hold resources for which others wait, such as generators of rollouts.
        """
        out = self.nodes_out(now) - self._draining
        for name, worker in list(self.workers.items()):
            if name not in generation.ranks and worker.node in out:
                self._outbox.fence(name)
                del self.workers[name]

    def _progress(self, generation: Generation, step: int, now: float) -> None:
        if not generation.step and self._ended is not None and self._ended.ended_at is not None:
            seconds = now - self._ended.ended_at
            self._outbox.event("recovered", {"generation": generation.number, "seconds": round(seconds, 3),
                                             "world_size": len(generation.members), "step": step})
            if self._ended.planned and not self._ended.lost:
                self._resizer.took(seconds)
            self._ended = None
        generation.step = step
        generation.stepped_at = now
        self._furthest = max(self._furthest, step)

    # -- helpers -----------------------------------------------------------------------------------
    def _abort(self, generation: Generation) -> None:
        if generation.aborted:
            return
        generation.aborted = True
        for name in generation.remaining:
            self._outbox.send(name, Abort(generation.number))

    def _raise_all(self, text: str) -> None:
        for worker in self.workers.values():
            self._outbox.send(worker.name, Raise(text))

    def _tell(self, generation: Generation, message: CoordinatorMessage) -> None:
        for name in generation.members:
            self._outbox.send(name, message)

    def _cut(self, name: str, why: str, now: float) -> None:
        self._outbox.fence(name)
        self.lost(name, why, now)

    def _exit_reason(self, name: str) -> ExitReason | None:
        return self.workers[name].left if name in self.workers else None
