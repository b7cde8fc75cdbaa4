"""Decide which workers form a generation and when the next one forms: a state machine without sockets and clock.

A worker is a process that can take a rank; a worker without a rank stands by. A generation runs until a member is lost
or fails, or until its members are asked to leave for a planned change. Then every member leaves, members that do not
leave in time are fenced, and the workers that remain form the next generation in the same processes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from tidewheel.elastic.admission import Admission
from tidewheel.elastic.blame import Blame
from tidewheel.elastic.failures import Failures
from tidewheel.elastic.generation import Generation, Limits, Outbox, Phase, Worker
from tidewheel.elastic.layout import largest_fit
from tidewheel.elastic.messages import Abort, ExitReason, Left, Over, Raise
from tidewheel.elastic.node_health import NodeHealth
from tidewheel.elastic.planned_changes import PlannedChanges
from tidewheel.elastic.policy import Backoff, FailureBudget, Recovery, Resizer
from tidewheel.elastic.rank_order import choose, described, split_groups
from tidewheel.elastic.silence import Silence, find_deaf, find_late
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
        self.remaining_seconds = float("inf")
        """Time until the run is over, at the current speed."""
        self.avoided: set[str] = set()
        """Nodes that are too slow. The run uses them again when too few others are left."""
        self._resizer = resizer
        self._outbox = outbox
        self._limits = limits
        self._admission = Admission(self.sizes, blame or Blame(Backoff(60.0, 3600.0)), outbox, self.workers,
                                    limits.start)
        self._health = health or NodeHealth(NodeChecksConfig(), outbox)
        self.failures = Failures(budget, resizer, self._admission, self._health, outbox, self.workers, furthest_step,
                                 self.sizes)
        self._largest_formed = 0
        self._awaited = ""  # a worker that had not connected when last looked for
        self._silence = Silence(self.workers, limits.heartbeat)
        self._tensor, self._group = tensor, group
        self.largest = max(self.sizes)
        """Most workers that a generation can have."""
        self._next = first_generation
        self._planned = PlannedChanges(resizer, outbox, self.workers)
        self._saved = 0
        self._not_before = float("-inf")  # form no generation earlier: failures follow each other too fast
        self._gathering_since: float | None = None
        self._fresh = True  # this group of workers has not formed a generation yet
        self._draining: set[str] = set()
        self._ended: Generation | None = None  # the previous one, until its successor has done a step

    @property
    def furthest_step(self) -> int:
        """The furthest step that the run has ever done."""
        return self.failures.furthest

    @property
    def recovery(self) -> Recovery:
        """How the run recovers from the last failure."""
        return self.failures.recovery

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

    def left(self, names: Iterable[str], report: Left, now: float) -> None:
        """Note that members have left their generation.

        Args:
            names: the members, thousands if a whole cluster was told to leave.
            report: their report; members with equal ones may be noted at the same time.
            now: the time.
        """
        generation = self.generation
        if generation is None or generation.number != report.generation:
            return
        left = [worker for name in names if name in generation.ranks and (worker := self.workers.get(name))]
        for worker in left:
            generation.remaining.pop(worker.name, None)
            worker.left = report.reason
            worker.text = report.text
            worker.beat = now
        if not left:
            return
        self.failures.note(generation, left, report)
        if report.saved_step is not None:
            self._saved = report.saved_step
            generation.step = report.saved_step
        if report.reason is not ExitReason.FINISHED:
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
        return self.failures.can_leave_out(worker, kind, text, now, fatal=fatal)

    def nodes_out(self, now: float) -> set[str]:
        """Return the nodes on which no worker may be started now: too slow, or blamed for failures."""
        return self.avoided | self._admission.blame.nodes_out(now)

    def stop_run(self) -> tuple[bool, int | None]:
        """Let the current generation save to storage and be the last one; see `Coordinator.stop_run`."""
        if self.phase is Phase.STOPPED:
            return True, self._saved
        generation = self.generation
        trains = generation is not None and generation.step > 0 and self.phase in (Phase.RUNNING, Phase.ENDING)
        self._planned.is_last = self._planned.is_last or trains
        return self._planned.is_last, None

    def give_up(self, why: str) -> None:
        """End all training here: another driver owns the run."""
        self.phase = Phase.FAILED
        self.failures.recovery = Recovery.NONE
        if self.generation is not None:
            self._abort(self.generation)
        self._raise_all(why)

    def finish(self) -> None:
        """Let all workers return: rank 0 has written the run's result."""
        self.phase = Phase.OVER
        self._outbox.send_all(list(self.workers), Over())

    # -- time --------------------------------------------------------------------------------------
    def tick(self, now: float) -> None:
        """Act on the time; call it several times a second."""
        for worker in self._silence.find(self.generation, now):
            self._cut(worker.name, f"no sign of life for {now - worker.beat:.1f} s", now)
        for worker in self._admission.probe(now, self.generation.remaining if self.generation is not None else ()):
            self._refuse(worker, f"its probe did not end within {self._limits.start:g} s", now)
        if self.phase is Phase.RUNNING:
            self._cut_deaf(now)
        if self.phase is Phase.RUNNING:
            self._planned.consider(self.generation, self._usable(), now, self.remaining_seconds)
        elif self.phase is Phase.ENDING:
            self._cut_late(now)
        elif self.phase is Phase.GATHERING:
            self._gather(now)

    def _cut_deaf(self, now: float) -> None:
        """Cut off members that do not hear the coordinator while the others wait for them."""
        assert self.generation is not None
        for name, seconds in find_deaf(self.generation, self._outbox.unheard, self._limits, now).items():
            self._cut(name, f"has acknowledged no message for {seconds:.1f} s", now)

    def _cut_late(self, now: float) -> None:
        """Cut off members that do not leave in time."""
        generation = self.generation
        assert generation is not None
        assert generation.ended_at is not None
        for name in find_late(generation, self.workers, self._limits, now):
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
        self.phase = Phase.FAILED
        verdict = self.failures.judge(generation, now)
        if self.recovery is Recovery.IN_PLACE:
            self._not_before = generation.began + verdict.pause  # a generation that lasted is no quick repetition
            self._regather(now)
        elif self.recovery is not Recovery.NONE:
            self._raise_all(f"in-place recovery has failed: {self.recovery}")
        elif verdict.raises:
            self._outbox.send(verdict.raises, Raise())
        else:
            self._raise_all(f"the run has failed: {verdict.cause}")

    def _regather(self, now: float) -> None:
        self.phase = Phase.GATHERING
        self._gathering_since = now
        self._end_generation()
        self._gather(now)

    def _refuse(self, worker: Worker, problem: str, now: float, *, at_start: bool = False) -> None:
        """Leave out a worker that did not pass its probe. Without enough others, this is a failure of the run."""
        number = self._next - 1 if self.phase is Phase.GATHERING else None
        if not self.failures.refuse(worker, problem, now, at_start=at_start, gathering_after=number):
            self.phase = Phase.FAILED
            self._raise_all(f"the run has failed: {problem}")

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
                self.failures.recovery = Recovery.KEPT
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
        for worker in ranked:
            worker.left = None
            worker.beat = now
        self._planned.announce(self._ended, generation)
        if split := split_groups(ranked, self._tensor):
            self._outbox.event("tensor_groups_split", described(split, generation.number, len(ranked), self._tensor))
        self._outbox.form(generation)
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
        self.failures.furthest = max(self.failures.furthest, step)

    # -- helpers -----------------------------------------------------------------------------------
    def _abort(self, generation: Generation) -> None:
        if generation.aborted:
            return
        generation.aborted = True
        self._outbox.send_all(list(generation.remaining), Abort(generation.number))

    def _raise_all(self, text: str) -> None:
        self._outbox.send_all(list(self.workers), Raise(text))

    def _cut(self, name: str, why: str, now: float) -> None:
        self._outbox.fence(name)
        self.lost(name, why, now)

    def _exit_reason(self, name: str) -> ExitReason | None:
        return self.workers[name].left if name in self.workers else None
