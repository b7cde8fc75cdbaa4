"""Run a graph: steps whose inputs are published run at the same time, under leases; published steps are skipped.

A training that overlaps its pipeline starts when the pipeline has published its first wave, and is published after it.

There is no Ray here. A `Launcher` runs a step and returns its artifact, each in a thread of this process.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from tidewheel.errors import ClusterError, TidewheelError, root_cause
from tidewheel.lease import BEAT_SECONDS, Leases
from tidewheel.workflow.graph import Node
from tidewheel.workflow.kinds import KINDS
from tidewheel.workflow.records import Record, Records, message

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
FOREIGN_SECONDS = 2.0  # between checks of a step that another driver runs
Say = Callable[[str], object]


class StepsFailed(ClusterError):
    """Raised when steps failed. Steps that do not depend on them are published."""


class Cancelled(TidewheelError):
    """Raised when the workflow was told to stop. Trainings have saved what they could."""

    exit_code = 143


class Launcher(Protocol):
    """Runs steps."""

    def launch(self, node: Node, max_workers: int | None) -> dict[str, Any]:
        """Run a step to its end, and return its artifact.

        Args:
            node: the step.
            max_workers: a training's share of the cluster; None: unlimited.
        """

    def interrupt(self, running: Sequence[Node]) -> None:
        """Let these steps save, then end them; their `launch` raises soon after."""

    def places(self, node: Node, *, spare_cpus: float = 0) -> int | None:
        """Return how many workers of this training fit on the cluster with `spare_cpus` left free; None: no limit."""


class Schedule:
    """One run of a graph.

    Args:
        nodes: the graph; a step comes after the steps that it reads.
        records: the workflow's records.
        leases: leases of this driver.
        launcher: runs the steps.
        say: gets lines of progress.
        stop: ends the run when it is set.
        beat_seconds: time between two renewals of the leases.
    """

    def __init__(self, nodes: Sequence[Node], records: Records, leases: Leases, launcher: Launcher, *, say: Say = print,
                 stop: threading.Event | None = None, beat_seconds: float = BEAT_SECONDS) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._records = records
        self._leases = leases
        self._launcher = launcher
        self._say = say
        self._stop = stop or threading.Event()
        self._beat_seconds = beat_seconds
        self._done: dict[str, Record] = {}
        self._failed: dict[str, BaseException] = {}
        self._running: dict[str, Future[Record]] = {}
        self._granted: dict[str, int] = {}
        self._check_after: dict[str, float] = {}  # monotonic seconds
        self._lost: set[str] = set()
        self._has_wave: set[str] = set()
        self._ended = threading.Event()

    def run(self) -> dict[str, Record]:
        """Run the graph, and return the records of all steps by name.

        Raises:
            StepsFailed: steps failed; the message names each with its log.
            Cancelled: `stop` was set, or `Workflow.cancel` was called.
        """
        heart = threading.Thread(target=self._beat, name="lease heartbeat", daemon=True)
        heart.start()
        pool = ThreadPoolExecutor(max(1, len(self._nodes)), thread_name_prefix="step")
        try:
            while not self._over() and not self._stop.is_set():
                self._start(pool)
                self._collect()
                time.sleep(POLL_SECONDS)
            if self._stop.is_set():
                self._cancel()
        finally:
            if self._running:
                self._launcher.interrupt([self._nodes[name] for name in self._running])
            self._ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
            heart.join(timeout=30)
            for name in self._nodes:
                self._leases.release(self._nodes[name].id)
        if self._failed:
            raise self._failure()
        return self._done

    # -- what to do next -----------------------------------------------------------------------
    def _ready(self) -> list[Node]:
        return [node for node in self._nodes.values()
                if node.name not in self._done and node.name not in self._failed and node.name not in self._running
                and all(need in self._done or (role == "data" and self._growing(node, need))
                        for role, need in node.needs.items())]

    def _growing(self, node: Node, need: str) -> bool:
        """Return whether a training may start beside its running pipeline, because the first wave is published."""
        if not node.entry.get("overlap") or need not in self._running:
            return False
        if need not in self._has_wave and time.monotonic() >= self._check_after.get(need, 0.0):
            self._check_after[need] = time.monotonic() + FOREIGN_SECONDS
            if KINDS["pipeline"].has_wave(self._nodes[need].place):
                self._has_wave.add(need)
        return need in self._has_wave

    def _over(self) -> bool:
        return not self._running and not self._ready()

    def _start(self, pool: ThreadPoolExecutor) -> None:
        for node in (ready := self._ready()):
            if time.monotonic() < self._check_after.get(node.name, 0.0):
                continue
            if (record := self._records.published(node)) is not None:
                self._done[node.name] = record
                self._say(f"{node.name}: published, {record.place}")
                continue
            if not self._leases.acquire(node.id):
                if node.name not in self._check_after:
                    self._say(f"{node.name}: another driver runs it; waiting")
                self._check_after[node.name] = time.monotonic() + FOREIGN_SECONDS
                continue
            if self._records.published(node) is not None:  # since the check above
                self._leases.release(node.id)
                continue
            share = self._share(node, ready)
            if share == 0:
                self._leases.release(node.id)
                self._check_after[node.name] = time.monotonic() + FOREIGN_SECONDS
                continue
            logger.info("step %s starts at %s", node.name, node.place)
            self._say(f"{node.name}: started" + (f" with up to {share} workers" if share else ""))
            self._running[node.name] = pool.submit(self._step, node, share)

    def _share(self, node: Node, ready: Sequence[Node]) -> int | None:
        """Return how many workers a training may use beside other trainings; None: no limit; 0: not now."""
        beside = [need for need in node.needs.values() if need not in self._done]
        slots = None
        if node.kind == "train":  # a pipeline beside it needs a CPU to go on
            slots = self._launcher.places(node, spare_cpus=1) if beside else self._launcher.places(node)
        if slots is None:
            return None
        if beside and slots < elastic(node)[0]:
            return 0
        other_least = [elastic(other)[0] for other in ready if other.kind == "train" and other.name != node.name
                       and other.name not in self._running]
        share = grant(slots, elastic(node), sum(self._granted.values()), other_least)
        if not share:
            return 0
        alone = not self._granted and not other_least and not beside  # it may also use nodes that join later
        self._granted[node.name] = share
        return None if alone else share

    def _step(self, node: Node, share: int | None) -> Record:
        self._records.record_attempt(node, "running")
        began = time.monotonic()
        artifact = self._launcher.launch(node, share)
        seconds = time.monotonic() - began
        while not all(need in self._done for need in node.needs.values()):
            if self._stop.is_set() or any(need in self._failed for need in node.needs.values()) \
                    or self._ended.wait(POLL_SECONDS):
                raise Cancelled("the pipeline that it reads has not ended", where=node.place)
        inputs = {role: self._nodes[need].key for role, need in node.needs.items()}
        return self._records.publish(node, inputs, artifact, seconds)

    def _collect(self) -> None:
        for name, future in list(self._running.items()):
            node = self._nodes[name]
            if name in self._lost:
                self._launcher.interrupt([node])
                self._say(f"{name}: another driver took its lease, because this one did not renew it; waiting for it")
                self._lost.discard(name)
            elif not future.done():
                continue
            del self._running[name]
            self._granted.pop(name, None)
            if not future.done():
                continue
            error = future.exception()
            if error is not None and (failed := [need for need in node.needs.values() if need in self._failed]):
                error = ClusterError(f"stopped, because {failed[0]} failed, whose shards it was reading",
                                     where=node.place, fix="run the workflow again: it resumes")
            if error is None:
                self._done[name] = record = future.result()
                self._say(f"{name}: published after {record.seconds:.1f} s, {record.place}")
            else:
                self._failed[name] = error
                logger.info("step %s failed", name, exc_info=error)
                self._records.record_attempt(node, "failed", error)
                self._say(f"{name}: failed: {message(error).splitlines()[0]}")
                if beside := [self._nodes[other] for other in self._running
                              if name in self._nodes[other].needs.values()]:
                    self._launcher.interrupt(beside)
            self._leases.release(node.id)

    # -- ends ----------------------------------------------------------------------------------
    def _cancel(self) -> None:
        running = [self._nodes[name] for name in self._running]
        self._say("stopping" + (f": {', '.join(node.name for node in running)}" if running else ""))
        self._launcher.interrupt(running)
        for node in running:
            with contextlib.suppress(BaseException):  # how an interrupted step ends is of no interest
                self._running[node.name].result(timeout=30)
            self._records.record_attempt(node, "stopped")
        self._running.clear()
        raise Cancelled("the workflow was stopped", where=self._records.store.uri,
                        fix="run it again: it resumes from what is published and saved")

    def _failure(self) -> StepsFailed:
        lines = [f"step {name} failed: {message(error)}\n  log: {self._records.log_uri(self._nodes[name])}"
                 for name, error in self._failed.items()]
        skipped = [name for name in self._nodes if name not in self._done and name not in self._failed]
        if skipped:
            lines.append(f"not run, because they read a failed step: {', '.join(skipped)}")
        bug = next((error for error in self._failed.values()
                      if not isinstance(root_cause(error), TidewheelError)), None)
        failure = StepsFailed("\n".join(lines), where=self._records.store.uri,
                              fix="correct that and run the workflow again: published steps are skipped, the others "
                                  "resume")
        if bug is not None:
            failure.__cause__ = bug
        return failure

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_seconds):
            try:
                lost = self._leases.beat()
                names = {node.id: name for name, node in self._nodes.items()}
                self._lost |= {names[node_id] for node_id in lost if node_id in names}
                if self._records.store.exists(cancel_key(self._leases.holder.driver)):
                    self._stop.set()
            except TidewheelError as error:  # the store is unavailable for a moment; the lease outlives several beats
                self._say(f"the lease could not be renewed ({error.what}); trying again")


def cancel_key(driver: str) -> str:
    """Return the key of the object whose existence tells a driver to stop."""
    return f"cancel/{driver}.json"


def elastic(node: Node) -> tuple[int, int]:
    """Return the least and the most workers of a training."""
    settings = node.entry["config"]["elastic"]
    return settings["min_workers"], settings["max_workers"]


def grant(places: int, bounds: tuple[int, int], taken: int, waiting: Sequence[int]) -> int:
    """Return the number of workers for one training, so that waiting trainings get their least too; 0: it waits.

    Args:
        places: workers that fit on the cluster.
        bounds: least and most workers of the training.
        taken: workers granted to running trainings.
        waiting: least workers of each other training that could start now.
    """
    least, most = bounds
    free = places - taken
    if free < least:
        return least if not taken else 0  # nothing runs: the training itself reports missing nodes, or waits for them
    reserved = 0
    for other in waiting:
        if least + reserved + other <= free:
            reserved += other
    return min(most, free - reserved)
