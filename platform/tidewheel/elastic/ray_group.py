"""The group of worker processes that Ray Train's controller drives.

The coordinator, not Ray, gives ranks to the processes (`worker`), so the group may change while the others train: a
lost worker leaves it, and a worker that was started for a new node, or to replace a lost one, joins it. When Ray Train
restarts the group, the processes that still answer are used again (`ray_workers`).

Watching and ending a worker use public Ray Core only; `ray_contract.CONTRACT` lists the private names that remain.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus, WorkerStatus

from tidewheel.elastic import nodes
from tidewheel.elastic.faults import MISTAKES
from tidewheel.elastic.ray_process import (
    LostWorkerError,
    SilentWorkerError,
    Worker,
    has_ended,
    one_line,
    result,
    unwrapped,
)
from tidewheel.elastic.ray_workers import Workers
from tidewheel.elastic.worker import RestartNeeded
from tidewheel.errors import TidewheelError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""Least time between two looks at the nodes while the group trains."""
SILENT_SECONDS_VARIABLE = "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"
SILENT_SECONDS = 600.0
"""Ray Train's default time after which a worker that does not answer counts as lost."""


class WorkerGroups:
    """Makes the groups of a run, in the place of Ray Train's class of groups.

    Args:
        pool: processes of the run.
    """

    def __init__(self, pool: Workers) -> None:
        self._pool = pool

    def create(self, train_run_context: Any, worker_group_context: Any, callbacks: Any = None) -> ElasticWorkerGroup:
        """Start a group, once there is room for a legal number of workers. Ray Train's controller calls this.

        Args:
            train_run_context: Ray Train's settings of the run.
            worker_group_context: Ray Train's settings of the group; the number of workers in it is the largest.
            callbacks: Ray Train's callbacks for groups; unused.

        Raises:
            ClusterError: there was no room, or no worker came up, for `elastic.start_timeout_seconds`.
            OwnershipError: another driver has taken over the run.
        """
        coordinator = self._pool.coordinator
        coordinator.controller_started.remote()
        try:
            workers = self._pool.gather()
            ray.get(coordinator.endpoint.remote())  # it imports torch meanwhile, which a busy machine makes slow
            group = ElasticWorkerGroup(self._pool, train_run_context, worker_group_context.train_fn_ref, workers)
            group.begin()
        except BaseException:
            self._pool.discard()
            raise
        return group


class ElasticWorkerGroup:
    """Workers whose training functions run, in the place of Ray Train's own group, which ends when one is lost.

    Args:
        pool: processes of the run.
        train_run_context: Ray Train's settings of the run.
        train_fn_ref: Ray Train's reference to the training function.
        workers: processes of the group; their functions start with `begin`.
    """

    def __init__(self, pool: Workers, train_run_context: Any, train_fn_ref: Any, workers: list[Worker]) -> None:
        self.pool = pool
        self.workers = workers
        self._train_run_context = train_run_context
        self._train_fn_ref = train_fn_ref
        self._look_at = 0.0
        self._staying: set[str] | None = None
        """Ids of the nodes whose workers nobody replaces, when the group last looked for room."""
        self._silent_seconds = float(os.environ.get(SILENT_SECONDS_VARIABLE, SILENT_SECONDS))

    # -- what Ray Train's controller calls ---------------------------------------------------------------
    def get_workers(self) -> list[Worker]:
        """Return the workers."""
        return self.workers

    def get_latest_poll_status(self) -> None:
        """Return None: only groups of replicas are judged by their last status."""

    def get_worker_group_state(self) -> None:
        """Return None: the number of workers is not Ray Train's decision."""

    def poll_status(self, timeout: float | None = None) -> WorkerGroupPollStatus:
        """Return the status of each worker, after taking lost ones out and putting new ones in.

        Args:
            timeout: longest wait for the workers' answers, in seconds.
        """
        statuses = self._without_lost(self._poll(timeout))
        if all(status.running and status.error is None for status in statuses):
            statuses += [WorkerStatus(running=True) for _ in range(self._admit())]
            self._start_more()
        return WorkerGroupPollStatus(worker_statuses=dict(enumerate(statuses)))

    def shutdown(self) -> None:
        """End the processes, but leave responsive ones for the next group."""
        self.pool.end_starting()
        keep = self.pool.keep
        self.pool.keep = False
        for worker in self.workers:
            if keep and self._idle(worker):
                self.pool.kept.append(worker)
            else:
                ray.kill(worker.actor)
        self.workers = []

    # -- start -------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Tell the coordinator whom to expect, and start the training function in every worker."""
        self._expect(self.workers, anew=True)
        try:
            ray.get([self._begin(worker, index) for index, worker in enumerate(self.workers)])
        except BaseException:
            for worker in self.workers:
                ray.kill(worker.actor)
            raise
        logger.info("training with %d worker processes", len(self.workers))

    def _begin(self, worker: Worker, index: int) -> Any:
        return worker.actor.begin.remote(self._train_run_context, self._train_fn_ref, index)

    def _expect(self, workers: list[Worker], *, anew: bool) -> None:
        names = {worker.name: worker.node for worker in workers}
        ray.get(self.pool.coordinator.expect.remote(names, anew), timeout=30)

    def _idle(self, worker: Worker) -> bool:
        """Return whether the worker answers and its training function has ended."""
        worker.answer = None
        status = result(worker.actor.poll_status.remote(), timeout=1.0)
        return status is not None and not status.running

    # -- while it runs -----------------------------------------------------------------------------------
    def _poll(self, timeout: float | None) -> list[WorkerStatus]:
        """Return each worker's status. A poll without an answer in time continues until the next call."""
        answers = [worker.poll() for worker in self.workers]
        done, _ = ray.wait(answers, num_returns=len(answers), timeout=timeout)
        answered = set(done)  # a list would be searched once for each of thousands of workers, four times a second
        return [self._status(worker, answered=worker.answer in answered) for worker in self.workers]

    def _status(self, worker: Worker, *, answered: bool) -> WorkerStatus:
        if not answered:
            silent_for = time.monotonic() - worker.asked_at
            if silent_for < self._silent_seconds:
                return WorkerStatus(running=True)
            return WorkerStatus(running=True, error=SilentWorkerError(
                f"worker {worker.name} on node {worker.node} has not answered for {silent_for:.0f} s"))
        answer = worker.answer
        worker.answer = None
        try:
            status: WorkerStatus = ray.get(answer)
        except Exception as error:  # also a value or an error of the function that cannot be unpickled here
            return WorkerStatus(running=False, error=LostWorkerError(
                f"worker {worker.name} on node {worker.node}: {one_line(error)}"))
        return status

    def _without_lost(self, statuses: list[WorkerStatus]) -> list[WorkerStatus]:
        """Remove workers without which the coordinator continues from the group; return the statuses of the rest."""
        by_name = {worker.name: status for worker, status in zip(self.workers, statuses, strict=True)}
        ended = [name for name, status in by_name.items() if has_ended(status.error)]
        lost: set[str] = ray.get(self.pool.coordinator.fenced.remote(), timeout=30)
        if ended:
            lost |= set(ray.get(self.pool.coordinator.dead.remote(ended, "its process has ended"), timeout=30))
        for name, status in by_name.items():
            if status.error is not None and name not in ended and self._goes_on_without(name, status.error):
                lost.add(name)
        lost &= by_name.keys()
        if not lost:
            return statuses
        if len(lost) == len(by_name):  # with no worker left the group has failed, also if they are silent only
            return [_failed(status, name) for name, status in by_name.items()]
        for worker in self.workers:
            if worker.name in lost and worker.name not in ended:
                ray.kill(worker.actor)
        self.workers = [worker for worker in self.workers if worker.name not in lost]
        return [status for name, status in by_name.items() if name not in lost]

    def _goes_on_without(self, name: str, error: BaseException) -> bool:
        """Return whether the run continues although this worker's function has raised `error`."""
        cause = unwrapped(error)
        if isinstance(cause, RestartNeeded):
            return False
        fatal = isinstance(cause, (TidewheelError, *MISTAKES))
        answer = self.pool.coordinator.raised.remote(name, type(cause).__name__, one_line(cause), fatal)
        return bool(ray.get(answer, timeout=30))

    def _start_more(self) -> None:
        """Start processes on nodes that joined, and to replace lost ones."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        coordinator = self.pool.coordinator
        avoided, out = ray.get([coordinator.avoided.remote(), coordinator.nodes_out.remote()], timeout=30)
        # a worker on a node that fails often was needed there: no other one takes its place while it lives
        self._staying = staying = {node.node_id for node in nodes.alive() if not node.draining} - out
        running = Counter(worker.node for worker in self.workers)
        taken = running + Counter(process.node for process in self.pool.starting)
        expected = running + Counter(process.node for process in self.pool.quick())
        requested = self.pool.most - sum(count for node, count in expected.items() if node in staying)
        if now >= self.pool.start_again_at and requested > 0:
            self.pool.start_on(self.pool.free_places(taken, requested, avoided=avoided))

    def _admit(self) -> int:
        """Put the started processes into the group; return how many."""
        staying = len(self.workers)
        if self._staying is not None:
            staying = sum(worker.node in self._staying for worker in self.workers)
        return sum(self._add(worker) for worker in self.pool.take_started(self.pool.most - staying))

    def _add(self, worker: Worker) -> bool:
        """Start the training function in one more worker; return False if it died meanwhile."""
        try:
            ray.get(self._begin(worker, len(self.workers)))
        except RayError:
            ray.kill(worker.actor)
            return False
        self._expect([worker], anew=False)
        self.workers.append(worker)
        return True


def _failed(status: WorkerStatus, name: str) -> WorkerStatus:
    """Return the status of a lost worker, with the error that ends its group."""
    if status.error is not None:
        return status
    return WorkerStatus(running=status.running, error=LostWorkerError(f"worker {name} is cut off"))
