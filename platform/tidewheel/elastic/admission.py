"""Which workers may have a rank: those of places that were blamed for a failure only after a probe."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tidewheel.elastic.blame import Blame, Exclusion, Fault, Level, Spare
from tidewheel.elastic.generation import Outbox, Worker
from tidewheel.elastic.layout import largest_fit


class Admission:
    """Carries out what `Blame` decides.

    Args:
        sizes: legal numbers of workers.
        blame: judges.
        outbox: is told.
        workers: those there are, by name; the membership's own.
        probe_seconds: a probe that takes longer has failed.
    """

    def __init__(self, sizes: Collection[int], blame: Blame, outbox: Outbox, workers: dict[str, Worker],
                 probe_seconds: float) -> None:
        self.blame = blame
        self._sizes, self._outbox, self._workers = tuple(sizes), outbox, workers
        self._probe_seconds = probe_seconds

    def available(self) -> list[Worker]:
        """The workers that can take a rank and keep it."""
        return [worker for worker in self._workers.values() if worker.available]

    def spares(self, counts: Callable[[Worker], bool]) -> Spare:
        """Whether those for whom `counts` holds are a legal number without a fault's process, device or node."""
        def spare(fault: Fault, level: Level) -> bool:
            def stays(worker: Worker) -> bool:
                if level is Level.PROCESS:
                    return worker.name != fault.worker
                elsewhere = worker.node != fault.node
                return elsewhere or (level is Level.DEVICE and worker.device != fault.device)

            rest = [worker for worker in self._workers.values() if counts(worker) and stays(worker)]
            return largest_fit(self._sizes, len(rest)) > 0

        return spare

    def leave_out(self, cause: Fault, out: Exclusion) -> None:
        """End the process that is to blame; the others of its place must pass a probe before they have a rank again."""
        self._outbox.event("worker_left_out", {
            "worker": cause.worker, "level": str(out.level), "node": out.node, "device": out.device,
            "reason": cause.text[:300], "seconds": round(out.seconds, 3), "times": out.times})
        self._outbox.fence(cause.worker)
        self._workers.pop(cause.worker, None)
        for worker in self._workers.values():
            same = out.level is Level.NODE or (out.level is Level.DEVICE and worker.device == out.device)
            worker.cleared = worker.cleared and not (same and worker.node == out.node)

    def refuse(self, fault: Fault, now: float) -> None:
        """End a process that did not pass its probe."""
        self.leave_out(fault, self.blame.refuse(fault, now))

    def pass_(self, worker: Worker) -> None:
        """A worker has passed its probe."""
        worker.cleared = True
        self._outbox.event("worker_readmitted", {"worker": worker.name, "node": worker.node, "device": worker.device})

    def probe(self, now: float) -> list[Worker]:
        """Ask those to probe themselves whose time has come; return those whose probe does not end."""
        stuck = []
        for worker in self._workers.values():
            if worker.cleared or not worker.connected:
                continue
            if worker.probed_at is None and not self.blame.is_out(worker.node, worker.device, now):
                worker.probed_at = now
                self._outbox.send(worker.name, {"do": "probe"})
            elif worker.probed_at is not None and now - worker.probed_at > self._probe_seconds:
                worker.probed_at = None
                stuck.append(worker)
        return stuck
