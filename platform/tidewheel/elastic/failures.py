"""Judge the generations that failed: who or what is to blame, how the run recovers, and what is recorded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tidewheel.elastic.admission import TEXT_CHARACTERS, Admission
from tidewheel.elastic.blame import Fault, Judgement, Level
from tidewheel.elastic.generation import Generation, Outbox, Worker
from tidewheel.elastic.layout import largest_fit
from tidewheel.elastic.messages import ExitReason, Left
from tidewheel.elastic.node_health import NodeHealth
from tidewheel.elastic.policy import FailureBudget, Recovery, Resizer


@dataclass(frozen=True)
class Verdict:
    """The findings about a generation that failed. `Failures.recovery` says how the run recovers."""

    cause: str
    """The error that ended it."""
    raises: str
    """The worker whose own error that is, if it still exists; "" otherwise."""
    pause: float
    """Seconds from its beginning until the next generation may begin."""


class Failures:
    """Judges failures.

    Args:
        budget: decides how the run recovers from a failure.
        resizer: is told of failures.
        admission: leaves out whom to blame.
        health: is told which nodes failed.
        outbox: receives events.
        workers: all workers by name; the membership's own mapping.
        furthest: furthest step that the run has ever done.
        sizes: legal numbers of workers.
    """

    def __init__(self, budget: FailureBudget, resizer: Resizer, admission: Admission, health: NodeHealth,
                 outbox: Outbox, workers: Mapping[str, Worker], furthest: int, sizes: Collection[int]) -> None:
        self.recovery = Recovery.IN_PLACE
        """How the run recovers from the last failure."""
        self.furthest = furthest
        """The furthest step that the run has ever done."""
        self._budget = budget
        self._resizer = resizer
        self._admission = admission
        self._health = health
        self._outbox = outbox
        self._workers = workers
        self._sizes = sizes

    def note(self, generation: Generation, left: Sequence[Worker], report: Left) -> None:
        """Note the errors in a report of members, and whom it accuses.

        Args:
            generation: their generation.
            left: the members.
            report: what each of them reports.
        """
        fatal = report.reason is ExitReason.FATAL
        kind = report.text.partition(":")[0]
        if fatal or report.reason is ExitReason.FAILED:
            generation.failed += [worker.name for worker in left]
        if report.error_kind or fatal:
            for worker in left:
                self._blame(generation, worker, report.error_kind or kind, report.text, fatal=fatal)
        for rank in report.accused * len(left):
            accused = self._workers.get(generation.members[rank]) if 0 <= rank < len(generation.members) else None
            if accused is not None:
                self._blame(generation, accused, kind, report.text, fatal=False)

    def judge(self, generation: Generation, now: float) -> Verdict:
        """Decide how to recover from a generation that failed, leave out whom to blame, and record it.

        Args:
            generation: the generation, which all members have left.
            now: monotonic seconds.
        """
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
        cause = self._record(generation, judgement)
        if judgement is not None and judgement.out is not None and self.recovery is not Recovery.NONE:
            self._health.failed(judgement.cause.node, judgement.cause.text)
            self._admission.leave_out(judgement.cause, judgement.out)
        raises = judgement.cause.worker if judgement is not None and self._can_raise(judgement.cause) else ""
        return Verdict(cause, raises, self._budget.pause)

    def can_leave_out(self, worker: Worker, kind: str, text: str, now: float, *, fatal: bool) -> bool:
        """Leave out a worker that raised an error outside any generation, if the run can continue without it.

        Args:
            worker: the worker.
            kind: class of the error.
            text: its message.
            now: monotonic seconds.
            fatal: a restart does not fix it.
        """
        fault = Fault(worker.name, worker.node, worker.device, kind, text, fatal, self.furthest)
        judgement = self._admission.blame.judge([fault], self._admission.spares(lambda other: not other.leaving), now)
        if judgement.out is None or judgement.final:
            return False
        self._admission.leave_out(judgement.cause, judgement.out)
        return True

    def refuse(self, worker: Worker, problem: str, now: float, *, at_start: bool, gathering_after: int | None) -> bool:
        """Leave out a worker that did not pass its probe; return False if the run has failed with it.

        Args:
            worker: the worker.
            problem: what the probe found.
            now: monotonic seconds.
            at_start: the probe is the test at the start of its process.
            gathering_after: number of the last generation, if the run waits for workers to form the next one.
        """
        worker.cleared = False
        starting = [other for other in self._workers.values() if not other.connected]
        awaited = len(starting) if at_start else 0  # they may be enough
        too_few = not largest_fit(self._sizes, len(self._admission.available()) + awaited)
        fault = Fault(worker.name, worker.node, worker.device, "probe", problem, False, self.furthest)
        self._health.failed(worker.node, problem)
        if too_few and gathering_after is not None and self.charge() is Recovery.NONE:
            self._outbox.event("failure", {"generation": gathering_after, "ranks": [], "nodes": [worker.node],
                                           "step": self.furthest, "error": problem[:TEXT_CHARACTERS],
                                           "recovery": str(self.recovery), "restart": False})
            return False
        level = Level.PROCESS
        if at_start:  # the next process there would fail as well
            level = Level.DEVICE if worker.device else Level.NODE
        self._admission.refuse(fault, now, level)
        return True

    def charge(self, *, counted: bool = True, in_place: bool = False, stepped: bool = False) -> Recovery:
        """Note one more failure; return how to recover from it.

        Args:
            counted: see `FailureBudget`.
            stepped: the generation did a step.
            in_place: a worker is left out, so recovery starts again with the first kind.
        """
        self._resizer.shrunk()
        self.recovery = self._budget.charge(self.furthest, counted=counted, stepped=stepped)
        if in_place and self.recovery is not Recovery.NONE:
            self.recovery = self._budget.first
        return self.recovery

    def _record(self, generation: Generation, judgement: Judgement | None) -> str:
        """Record the failure of a generation; return its cause."""
        if judgement is not None:
            workers = [judgement.cause.worker]
            cause = judgement.cause.text
        else:
            failed = [name for name in generation.failed if name in self._workers]
            workers = list(generation.lost or failed)
            texts = [*generation.lost.values(), *(self._workers[name].text for name in failed)]
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
        worker = self._workers.get(cause.worker)
        return worker is not None and worker.text == cause.text

    def _blame(self, generation: Generation, worker: Worker, kind: str, text: str, *, fatal: bool) -> None:
        generation.faults.append(Fault(worker.name, worker.node, worker.device, kind, text, fatal, self.furthest))
