"""Decide which workers may have a rank. After a failure, workers of a blamed device or node must pass a probe first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container

from tidewheel.elastic.blame import Blame, Exclusion, Fault, Level, Spare
from tidewheel.elastic.generation import Outbox, Worker
from tidewheel.elastic.layout import largest_fit
from tidewheel.elastic.messages import Probe

TEXT_CHARACTERS = 300
"""Characters of an error in an event."""


class Admission:
    """Carries out the decisions of `Blame`.

    Args:
        sizes: legal numbers of workers.
        blame: judges failures.
        outbox: receives messages and events.
        workers: all workers by name; the membership's own mapping.
        probe_seconds: a probe that takes longer has failed.
    """

    def __init__(self, sizes: Collection[int], blame: Blame, outbox: Outbox, workers: dict[str, Worker],
                 probe_seconds: float) -> None:
        self.blame = blame
        self._sizes = tuple(sizes)
        self._outbox = outbox
        self._workers = workers
        self._probe_seconds = probe_seconds

    def available(self) -> list[Worker]:
        """Return the workers that can take a rank and keep it."""
        return [worker for worker in self._workers.values()  # `Worker.available`, for thousands several times a second
                if worker.connected and worker.cleared and not worker.leaving]

    def spares(self, counts: Callable[[Worker], bool]) -> Spare:
        """Return a function that says whether enough workers remain without a fault's process, device or node.

        Args:
            counts: whether a worker counts among the remaining ones.
        """
        def spare(fault: Fault, level: Level) -> bool:
            def stays(worker: Worker) -> bool:
                if level is Level.PROCESS:
                    return worker.name != fault.worker
                if level is Level.DEVICE:
                    return worker.node != fault.node or worker.device != fault.device
                return worker.node != fault.node

            rest = [worker for worker in self._workers.values() if counts(worker) and stays(worker)]
            return largest_fit(self._sizes, len(rest)) > 0

        return spare

    def leave_out(self, cause: Fault, exclusion: Exclusion) -> None:
        """End the blamed process. Other workers of the excluded device or node must pass a probe to get a rank."""
        self._outbox.event("worker_left_out", {
            "worker": cause.worker, "level": str(exclusion.level), "node": exclusion.node, "device": exclusion.device,
            "reason": cause.text[:TEXT_CHARACTERS], "seconds": round(exclusion.seconds, 3), "times": exclusion.times})
        self._outbox.fence(cause.worker)
        self._workers.pop(cause.worker, None)
        for worker in self._workers.values():
            same_device = exclusion.level is Level.DEVICE and worker.device == exclusion.device
            if worker.node == exclusion.node and (same_device or exclusion.level is Level.NODE):
                worker.cleared = False

    def refuse(self, fault: Fault, now: float, level: Level = Level.PROCESS) -> None:
        """End a process that did not pass its probe.

        Args:
            fault: what the probe found.
            now: monotonic seconds.
            level: what to leave out for a time.
        """
        self.leave_out(fault, self.blame.refuse(fault, now, level))

    def readmit(self, worker: Worker) -> None:
        """Let a worker that passed its probe have a rank again."""
        worker.cleared = True
        self._outbox.event("worker_readmitted", {"worker": worker.name, "node": worker.node, "device": worker.device})

    def probe(self, now: float, training: Container[str] = ()) -> list[Worker]:
        """Ask workers whose exclusion is over to probe themselves; return those whose probe takes too long.

        Args:
            now: monotonic seconds.
            training: names of the workers that have not left their generation. They could not answer before they leave
                it, so they are asked then.
        """
        late = []
        for worker in self._workers.values():
            if worker.cleared or not worker.connected or worker.name in training:
                continue
            if worker.probed_at is None and not self.blame.is_out(worker.node, worker.device, now):
                worker.probed_at = now
                self._outbox.send(worker.name, Probe())
            elif worker.probed_at is not None and now - worker.probed_at > self._probe_seconds:
                worker.probed_at = None
                late.append(worker)
        return late
