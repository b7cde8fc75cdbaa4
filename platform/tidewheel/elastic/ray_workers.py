"""The group of worker processes that Ray Train's controller drives.

The coordinator, not Ray, gives ranks to the processes (`worker`), so the group may change while the others train: a
lost worker leaves it, and a worker that was started for a new node, or to replace a lost one, joins it. When Ray Train
restarts the group, the processes that still answer are used again.

A worker is Ray Train's worker actor (`ray_process`). Placing it, watching it and ending it use public Ray Core only;
`ray_contract.CONTRACT` lists the private names that remain.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus, WorkerStatus
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidewheel.elastic import layout, nodes
from tidewheel.elastic.faults import MISTAKES
from tidewheel.elastic.ray_process import (
    ElasticRayTrainWorker,
    LostWorkerError,
    SilentWorkerError,
    Starting,
    Worker,
    actor_resources,
    has_ended,
    one_line,
    result,
    train_environment,
    unwrapped,
)
from tidewheel.elastic.worker import RestartNeeded
from tidewheel.errors import ClusterError, TidewheelError
from tidewheel.placement import with_labels
from tidewheel.train.elastic_config import ElasticConfig

logger = logging.getLogger(__name__)

START_SECONDS = 15.0
"""Longest wait of a group for processes that come up, once a legal number is up. The others join it later."""
CROWDED_SECONDS = 3.0
"""The same for processes on nodes whose resources others held when they were started, such as generators of rollouts.
What a process that has just ended held may still seem to be held."""
PLACED_SECONDS = 3.0
"""Longest wait until Ray shows that new processes hold resources, which takes 0.1 to 1 s."""
SETTLE_SECONDS = 10.0
"""Longest wait until Ray has noticed dead nodes: 1-2 s on a local cluster, longer with Ray's defaults."""
IDLE_SECONDS = 0.5
"""Pause between two looks for room while there is none."""
AGAIN_SECONDS = 10.0
"""Pause after a process that did not come up, before the next is started."""
LOOK_SECONDS = 0.5
"""Least time between two looks at the nodes while the group trains."""
SILENT_SECONDS_VARIABLE = "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"
SILENT_SECONDS = 600.0
"""Ray Train's default time after which a worker that does not answer counts as lost."""


class Workers:
    """The worker processes of a run, through all of Ray Train's groups; lives in the controller.

    Args:
        elastic: resources of a worker, and limits on the number of workers.
        sizes: legal numbers of workers.
        coordinator: handle of the run's coordinator.
    """

    def __init__(self, elastic: ElasticConfig, sizes: tuple[int, ...], coordinator: Any) -> None:
        self.elastic = elastic
        self.coordinator = coordinator
        self.sizes = sizes
        self.most = max(sizes) + elastic.standby_workers
        self.early: list[tuple[Any, str]] = []
        """Actors that were started before the controller, and their nodes."""
        self.keep = False
        """Whether the next shutdown of a group leaves the processes that answer."""
        self.kept: list[Worker] = []
        self.starting: list[Starting] = []
        self.start_again_at = 0.0
        """Monotonic time before which no process is started beside a group that trains."""

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
        self.coordinator.controller_started.remote()
        try:
            self.adopt(self.early)
            self.early = []
            workers = self._gather()
            ray.get(self.coordinator.endpoint.remote())  # it imports torch meanwhile, which a busy machine makes slow
            group = ElasticWorkerGroup(self, train_run_context, worker_group_context.train_fn_ref, workers)
            group.begin()
        except BaseException:
            self.discard()
            raise
        return group

    def _gather(self) -> list[Worker]:
        """Return a legal number of workers: those kept, and new ones. Wait until there is room for them."""
        no_room_since: float | None = None
        not_up_since: float | None = None
        while True:
            lost = ray.get(self.coordinator.lost.remote())
            if lost is not None:
                raise lost
            usable = nodes.usable(self.elastic.placement.selector, SETTLE_SECONDS)
            size = layout.largest_fit(self.sizes, layout.slots([node.resources for node in usable], self.elastic.needs))
            if not size:
                no_room_since = self._waited(no_room_since, "found no room")
                time.sleep(IDLE_SECONDS)  # until the next look at the nodes
                continue
            no_room_since = None
            workers = self._take_kept()
            workers += self._start_up_to(size, workers)
            if layout.largest_fit(self.sizes, len(workers)):
                return workers
            self.kept = workers
            not_up_since = self._waited(not_up_since, "did not come up")

    def _waited(self, since: float | None, problem: str) -> float:
        """Return since when the run has waited for workers; raise once that is too long."""
        now = time.monotonic()
        limit = self.elastic.start_timeout_seconds
        if since is None:
            self.coordinator.say.remote("waiting for nodes")
            return now
        if now - since > limit:
            where = with_labels(self.elastic.placement.selector)
            raise ClusterError(f"{min(self.sizes)} worker(s) {problem} on nodes{where} for {limit:g} s",
                               where="elastic.min_workers",
                               fix="add nodes and start the run again: it continues from its last checkpoint")
        return since

    def _start_up_to(self, size: int, workers: list[Worker]) -> list[Worker]:
        """Start processes in addition to `workers`, up to `size` in all; return the processes that started."""
        held = [*(worker.node for worker in workers), *(process.node for process in self.starting)]
        expected = len(workers) + len(self.quick(CROWDED_SECONDS))
        missing = size - expected
        avoided: set[str] = ray.get(self.coordinator.avoided.remote(), timeout=30)
        node_ids = self.free_places(Counter(held), missing, settle_seconds=SETTLE_SECONDS, avoided=avoided)
        if avoided and not layout.largest_fit(self.sizes, expected + len(node_ids)):
            node_ids = self.free_places(Counter(held), missing)  # a node that is better avoided is better than none
        self.start_on(node_ids)
        return self._come_up(size - len(workers), len(workers))

    def _come_up(self, requested: int, present: int) -> list[Worker]:
        """Wait until processes have started, for START_SECONDS at most; return the started ones.

        Those on crowded nodes are waited for only CROWDED_SECONDS if the workers are a legal number without them, or if
        there are no others: their nodes may be held until the run ends.

        Args:
            requested: most processes to wait for.
            present: workers that the group has besides.
        """
        workers: list[Worker] = []
        began = time.monotonic()
        while self.starting and len(workers) < requested:
            ends = began + START_SECONDS
            if layout.largest_fit(self.sizes, present + len(workers)):
                ends = max(process.began + CROWDED_SECONDS if process.crowded else ends for process in self.starting)
            elif all(process.crowded for process in self.starting):
                ends = began + CROWDED_SECONDS
            left = ends - time.monotonic()
            if left <= 0:
                break
            ray.wait([process.identity for process in self.starting], timeout=left)
            workers += self.take_started(requested - len(workers))
        return workers

    def take_started(self, room: int) -> list[Worker]:
        """Remove started processes from the starting ones, and end the processes that take too long.

        Args:
            room: most processes to return. Once these are up all others end: a start that was slow has had substitutes,
                and would hold what others, such as generators of rollouts, wait for.
        """
        now = time.monotonic()
        up: list[Worker] = []
        waiting: list[Starting] = []
        for process in self.starting:
            done, _ = ray.wait([process.identity], timeout=0)
            identity = result(process.identity) if done else None
            if identity is not None and len(up) < room:
                name, node = identity
                up.append(Worker(process.actor, name, node))
            elif identity is not None:
                ray.kill(process.actor)
            elif done or now - process.began > self.elastic.start_timeout_seconds:
                ray.kill(process.actor)
                self.start_again_at = now + AGAIN_SECONDS
            else:
                waiting.append(process)
        self.starting = waiting
        if len(up) >= room:
            self.end_starting()
        return up

    def start_on(self, node_ids: list[str]) -> None:
        """Start a process on the node of each id in `node_ids`; do not wait for it."""
        options = {**actor_resources(self.elastic.needs), "runtime_env": {"env_vars": train_environment()}}
        remote: Any = ray.remote(**options)(ElasticRayTrainWorker)
        free = nodes.free() if node_ids else {}
        begun = Counter[str]()
        for node in node_ids:
            actor = remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
            crowded = node in free and begun[node] >= self._slots(free[node])
            begun[node] += 1
            self.starting.append(Starting(actor, node, actor.identify.remote(), time.monotonic(), crowded))

    def start_early(self, *, placed: bool = False) -> list[tuple[Any, str]]:
        """Start processes where there is room now, before there is a controller; return their actors and node ids.

        They import what training needs while the coordinator's and the controller's processes come up. The caller's
        process owns the actors: they end when nobody holds them any more.

        Args:
            placed: return when they hold what they need of their nodes, after PLACED_SECONDS at the latest. Others that
                the caller starts next, such as generators of rollouts, then cannot take it.
        """
        usable = nodes.usable(self.elastic.placement.selector)
        size = layout.largest_fit(self.sizes, layout.slots([node.resources for node in usable], self.elastic.needs))
        free = nodes.free()
        node_ids = []
        for node_id, count in Counter(self.free_places(Counter(), size)).items():
            node_ids += [node_id] * min(count, self._slots(free.get(node_id, {})))
        self.start_on(node_ids)
        early = [(process.actor, process.node) for process in self.starting]
        self.starting = []
        if placed:
            self._await_room_taken(Counter(node_ids), free)
        return early

    def _await_room_taken(self, started: Counter[str], before: Mapping[str, Mapping[str, float]]) -> None:
        """Wait until Ray shows that as many slots as were started on each node have been taken since `before`."""
        until = time.monotonic() + PLACED_SECONDS
        while time.monotonic() < until:
            now = nodes.free()
            if all(self._slots(now.get(node, {})) <= self._slots(before[node]) - count
                   for node, count in started.items()):
                return
            time.sleep(0.05)

    def adopt(self, early: list[tuple[Any, str]]) -> None:
        """Take over processes of `start_early` that another process has started."""
        now = time.monotonic()
        avoided: set[str] = ray.get(self.coordinator.avoided.remote(), timeout=30) if early else set()
        for actor, node in early:
            if node in avoided:
                ray.kill(actor)
            else:
                self.starting.append(Starting(actor, node, actor.identify.remote(), now))

    def free_places(self, taken: Counter[str], requested: int, *, settle_seconds: float = 0.0,
                    avoided: Collection[str] = ()) -> list[str]:
        """Return ids of nodes with room for up to `requested` more workers, an id for each worker.

        Args:
            taken: workers that each node has, by node id.
            requested: most ids to return.
            settle_seconds: longest wait until Ray has noticed dead nodes.
            avoided: ids of nodes on which no worker shall be started.
        """
        if requested <= 0:
            return []
        usable = nodes.usable(self.elastic.placement.selector, settle_seconds)
        free = nodes.free()
        places: list[tuple[bool, bool, str]] = []  # rank 0 belongs on a node that stays; then come those with room now
        for node in usable:
            if node.node_id not in avoided:
                count = max(0, self._slots(node.resources) - taken[node.node_id])
                now = self._slots(free.get(node.node_id, {}))
                places += [(node.spot, place >= now, node.node_id) for place in range(count)]
        places.sort(key=lambda place: place[:2])
        return [node_id for _, _, node_id in places[:requested]]

    def quick(self, crowded_seconds: float = START_SECONDS) -> list[Starting]:
        """Return the starting processes that may be up soon. Others may wait for what another actor on a node holds.

        Args:
            crowded_seconds: time in which a process on a crowded node may be up.
        """
        now = time.monotonic()
        return [process for process in self.starting
                if now - process.began < (crowded_seconds if process.crowded else START_SECONDS)]

    def _slots(self, resources: Mapping[str, float]) -> int:
        return layout.slots([resources], self.elastic.needs)

    def _take_kept(self) -> list[Worker]:
        """Return the kept processes that still answer; end the others."""
        kept = self.kept
        self.kept = []
        answers: dict[Any, Worker] = {worker.actor.identify.remote(): worker for worker in kept}
        done, silent = ray.wait(list(answers), num_returns=len(answers), timeout=2) if answers else ([], [])
        for answer in silent:
            ray.kill(answers[answer].actor)
        return [answers[answer] for answer in done if result(answer) is not None]

    def end_starting(self) -> None:
        """End the processes that are coming up."""
        for process in self.starting:
            ray.kill(process.actor)
        self.starting = []

    def discard(self) -> None:
        """End the processes that were kept or are coming up."""
        for worker in self.kept:
            ray.kill(worker.actor)
        self.kept = []
        self.end_starting()


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
