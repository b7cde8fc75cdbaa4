"""Ray Train's group of workers, made to live with what happens to them.

The workers are processes that take ranks as the coordinator says (`worker`); which of them have one is none of Ray's
business. So a lost worker is taken out of the group instead of ending it, and one that is started for a node that
joined, or in place of a lost one, is put in while the others train. When Ray does restart the group, the processes that
still answer are used again. Every internal name used here is in `ray_contract.CONTRACT`.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import PlacementGroupHandle
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker, Worker
from ray.train.v2._internal.util import bundle_to_remote_args
from ray.train.v2.api.exceptions import ControllerError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidewheel.elastic import layout, nodes
from tidewheel.elastic.faults import MISTAKES
from tidewheel.elastic.no_barrier import no_barrier
from tidewheel.elastic.nodes import Node
from tidewheel.elastic.worker import RestartNeeded, notice
from tidewheel.errors import TidewheelError, root_cause
from tidewheel.train.config import ElasticConfig

START_SECONDS = 15.0
"""A group does not wait longer for processes that come up, if a legal number is there: the others join it later."""
AGAIN_SECONDS = 10.0
"""Time after a start that failed before the next try."""
LOOK_SECONDS = 0.5
"""Time between two looks at the nodes."""


class NoPlacementGroup(PlacementGroupHandle):
    """Workers come and go one by one: each reserves its own CPUs and GPUs on its node."""

    @property
    def placement_group(self) -> Any:
        return None

    def ready(self) -> Any:
        return ray.put(True)

    def wait(self, timeout_seconds: float = 30) -> bool:
        return True

    def shutdown(self) -> None:
        """Nothing is held."""


class ElasticRayTrainWorker(RayTrainWorker):
    """Ray Train's worker, which takes SIGTERM as notice that its machine will be taken away."""

    def __init__(self) -> None:
        super().__init__()
        signal.signal(signal.SIGTERM, lambda *_: notice())  # this is the main thread, where handlers are set


@dataclass
class Starting:
    """A worker process that is coming up."""

    actor: Any
    node: str
    metadata: Any
    began: float


class Workers:
    """The worker processes of a run, through all of Ray Train's groups; lives in the controller.

    Args:
        elastic: resources of a worker, and how many there may be.
        sizes: legal numbers of workers.
        coordinator: the run's.
    """

    def __init__(self, elastic: ElasticConfig, sizes: tuple[int, ...], coordinator: Any) -> None:
        self.elastic, self.coordinator, self.sizes = elastic, coordinator, sizes
        self.most = max(sizes) + elastic.standby_workers
        self.keep = False
        """The next shutdown of the group leaves the processes that answer."""
        self.kept: list[Worker] = []
        self.starting: list[Starting] = []
        """Processes that were coming up when their group could not begin, for the next one."""

    @property
    def held(self) -> int:
        """Workers that the next group need not start."""
        return len(self.kept) + len(self.starting)

    def create(self, train_run_context: Any, worker_group_context: Any, callbacks: Any) -> ElasticWorkerGroup:
        """What Ray's controller calls to start a group."""
        group = ElasticWorkerGroup(train_run_context, worker_group_context, callbacks)
        group.pool = self
        try:
            with no_barrier():
                group._start()
        except WorkerGroupStartupTimeoutError:
            raise  # what is up, and what is coming up, is there for the next try
        except BaseException:
            self.discard()
            raise
        return group

    def slots(self, node: Node) -> int:
        """Workers that a node has room for."""
        return layout.slots([node.resources], self.elastic.needs)

    def discard(self) -> None:
        """End the processes that were kept."""
        for actor in [*(worker.actor for worker in self.kept), *(one.actor for one in self.starting)]:
            ray.kill(actor)
        self.kept, self.starting = [], []

    def take(self) -> list[Worker]:
        """The processes that were kept and still answer."""
        kept, self.kept = self.kept, []
        answers: dict[Any, Worker] = {worker.actor.get_metadata.remote(): worker for worker in kept}
        done, silent = ray.wait(list(answers), num_returns=len(answers), timeout=2) if answers else ([], [])
        for answer in silent:
            ray.kill(answers[answer].actor)
        return [answers[answer] for answer in done if _result(answer) is not None]

    def free_places(self, taken: Counter[str], wanted: int, *, patience_seconds: float = 0.0,
                    avoided: Collection[str] = ()) -> list[str]:
        """Ids of nodes with room for up to `wanted` more workers, one for each, those of a node together."""
        places: list[str] = []
        if wanted > 0:
            usable = nodes.usable(self.elastic.placement.selector, patience_seconds)
            for node in sorted(usable, key=lambda node: node.spot):  # one that stays is there for rank 0
                if node.node_id in avoided:
                    continue
                places += [node.node_id] * max(0, self.slots(node) - taken[node.node_id])
        return places[:wanted]


class ElasticWorkerGroup(WorkerGroup):
    """See the module."""

    pool: Workers

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._starting: list[Starting] = []
        self._look_at, self._again_at = 0.0, 0.0
        self._gone: set[str] = set()  # cut off by the coordinator and ended here

    # -- start and end -----------------------------------------------------------------------------
    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> PlacementGroupHandle:
        return NoPlacementGroup()

    def _create_workers(self, num_workers: int, placement_group: Any, resources_per_worker: dict[str, float],
                        *arguments: Any, **named: Any) -> list[Worker]:
        workers = self.pool.take()
        self._starting, self.pool.starting = self.pool.starting, []
        held = [*(worker.metadata.node_id for worker in workers), *(one.node for one in self._starting)]
        missing = num_workers - len(held)
        avoided: set[str] = ray.get(self.pool.coordinator.avoided.remote(), timeout=30)
        places = self.pool.free_places(Counter(held), missing, patience_seconds=START_SECONDS, avoided=avoided)
        if avoided and not layout.largest_fit(self.pool.sizes, len(held) + len(places)):  # better there than nowhere
            places = self.pool.free_places(Counter(held), missing)
        self._starting += [self._start_process(node, resources_per_worker) for node in places]
        workers += self._come_up(num_workers - len(workers), resources_per_worker)
        if not layout.largest_fit(self.pool.sizes, len(workers)):
            self.pool.kept, self.pool.starting = workers, self._starting
            self._starting = []
            raise WorkerGroupStartupTimeoutError(num_workers)
        self._expect(workers, anew=True)
        return self._assign_worker_ranks(workers)

    def _come_up(self, wanted: int, resources: dict[str, float]) -> list[Worker]:
        """Wait until `wanted` of those that start are up, or for START_SECONDS; return those that are."""
        workers: list[Worker] = []
        until = time.monotonic() + START_SECONDS
        while self._starting and len(workers) < wanted and time.monotonic() < until:
            ray.wait([one.metadata for one in self._starting], timeout=max(0.0, until - time.monotonic()))
            workers += self._up(resources)
        return workers

    def _up(self, resources: dict[str, float]) -> list[Worker]:
        """Take those out of the starting ones whose processes are up; end those that take too long."""
        now, up = time.monotonic(), list[Worker]()
        waiting: list[Starting] = []
        for one in self._starting:
            done, _ = ray.wait([one.metadata], timeout=0)
            metadata = _result(one.metadata) if done else None
            if metadata is not None:
                up.append(Worker(one.actor, metadata, resources))
            elif done or now - one.began > self.pool.elastic.start_timeout_seconds:
                ray.kill(one.actor)
                self._again_at = now + AGAIN_SECONDS
            else:
                waiting.append(one)
        self._starting = waiting
        return up

    def _start_process(self, node: str, resources: dict[str, float]) -> Starting:
        environment = self._get_worker_runtime_env(self._train_run_context.run_config.worker_runtime_env or {})
        remote: Any = ray.remote(runtime_env=environment, **bundle_to_remote_args(resources))(ElasticRayTrainWorker)
        actor = remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        return Starting(actor, node, actor.get_metadata.remote(), time.monotonic())

    def shutdown(self) -> None:
        self._end_starting()
        keep, self.pool.keep = self.pool.keep, False
        workers = self.get_workers()
        if keep:
            self.pool.kept = [worker for worker in workers if self._idle(worker)]
            self._set_workers([worker for worker in workers if worker not in self.pool.kept])
        super().shutdown()

    def abort(self) -> None:
        self._end_starting()
        self.pool.discard()
        super().abort()

    def _end_starting(self) -> None:
        for one in self._starting:
            ray.kill(one.actor)
        self._starting = []

    def _idle(self, worker: Worker) -> bool:
        """It answers, and its training function has ended."""
        status = _result(worker.actor.poll_status.remote(), timeout=1.0)
        return status is not None and not status.running

    # -- while it runs -------------------------------------------------------------------------------
    def _poll_workers_and_collect_errors(self, timeout: float | None) -> list[WorkerStatus]:
        statuses = super()._poll_workers_and_collect_errors(timeout)
        statuses = self._without_lost(statuses)
        if all(status.running and status.error is None for status in statuses):
            statuses += [WorkerStatus(running=True) for _ in range(self._admit())]
            self._start_more()
        return statuses

    def _without_lost(self, statuses: list[WorkerStatus]) -> list[WorkerStatus]:
        """Take out of the group whom the coordinator does without."""
        workers = self.get_workers()
        fenced: set[str] = ray.get(self.pool.coordinator.fenced.remote(), timeout=30)
        names = [_name(worker) for worker in workers]
        dead = {name: status.error for name, status in zip(names, statuses, strict=True)
                if isinstance(status.error, WorkerHealthCheckFailedError)}
        if dead:
            known = ray.get(self.pool.coordinator.dead.remote(list(dead), "its process has ended"), timeout=30)
            fenced |= set(known)
        raised = {name: status.error for name, status in zip(names, statuses, strict=True)
                  if status.error is not None and name not in dead}
        fenced |= {name for name, error in raised.items() if self._goes_on_without(name, error)}
        lost = {name for name in names if name in fenced}
        if not lost or len(lost) == len(workers):  # with nobody left it is a failure of the group
            return statuses
        for worker in workers:
            if _name(worker) in lost and _name(worker) not in dead:
                ray.kill(worker.actor)
        stay = [index for index, name in enumerate(names) if name not in lost]
        polls = self._world_rank_to_ongoing_poll
        self._world_rank_to_ongoing_poll = {new: polls[old] for new, old in enumerate(stay) if old in polls}
        self._set_workers([workers[index] for index in stay])
        return [statuses[index] for index in stay]

    def _goes_on_without(self, name: str, error: BaseException) -> bool:
        """Whether the run goes on though this worker's function has ended by `error`."""
        cause = unwrapped(error)
        if isinstance(cause, RestartNeeded):
            return False
        fatal = isinstance(cause, (TidewheelError, *MISTAKES))
        answer = self.pool.coordinator.raised.remote(name, type(cause).__name__, one_line(cause), fatal)
        return bool(ray.get(answer, timeout=30))

    def _start_more(self) -> None:
        """Processes for nodes that joined, and in place of those lost."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        avoided: set[str] = ray.get(self.pool.coordinator.avoided.remote(), timeout=30)
        staying = {node.node_id for node in nodes.alive() if not node.draining} - avoided
        there = Counter(worker.metadata.node_id for worker in self.get_workers())
        taken = there + Counter(one.node for one in self._starting)
        # one that takes long may have found no place, because others use its node too: it may, but need not, come
        hoped = there + Counter(one.node for one in self._starting if now - one.began < START_SECONDS)
        wanted = self.pool.most - sum(count for node, count in hoped.items() if node in staying)
        if now < self._again_at or wanted <= 0:
            return
        new = [self._start_process(node, self._worker_group_context.resources_per_worker)
               for node in self.pool.free_places(taken, wanted, avoided=avoided)]
        self._starting += new

    def _admit(self) -> int:
        """Put into the group whose process is up; how many."""
        return sum(self._add(worker) for worker in self._up(self._worker_group_context.resources_per_worker))

    def _add(self, worker: Worker) -> int:
        """Start the training function in one more worker: 1, or 0 when it died meanwhile."""
        workers = self.get_workers()
        self._assign_worker_ranks([worker], len(workers), len(workers) + 1)
        try:
            self._init_train_context([worker], self.get_worker_group_state().sync_actor)
            ray.get(worker.actor.run_train_fn.remote(self._worker_group_context.train_fn_ref))
        except RayError:
            ray.kill(worker.actor)
            return 0
        self._expect([worker], anew=False)
        self._set_workers([*workers, worker])
        return 1

    def _expect(self, workers: list[Worker], *, anew: bool) -> None:
        names = {_name(worker): worker.metadata.node_id for worker in workers}
        ray.get(self.pool.coordinator.expect.remote(names, anew), timeout=30)

    def _set_workers(self, workers: list[Worker]) -> None:
        """Make these the group, for Ray and for what Ray calls after each poll."""
        state = self.get_worker_group_state()
        self._worker_group_state = replace(state, workers=workers)
        self._worker_rank_to_replica_group_rank = {rank: rank for rank in range(len(workers))}
        for callback in self._callbacks:
            if hasattr(callback, "set_required_ranks"):  # it counts the reports of all workers
                callback.after_worker_group_start(self)


def unwrapped(error: BaseException) -> BaseException:
    """What Ray's wrappers hold: our own error where there is one, else what was first raised."""
    while True:
        inner: Any
        if isinstance(error, UserExceptionWithTraceback):
            inner = error._base_exc
        elif isinstance(error, ControllerError):
            inner = error.controller_failure
        else:
            return root_cause(error)
        error = inner


def one_line(error: BaseException) -> str:
    """Class and text of an error, for an event."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def _name(worker: Worker) -> str:
    return str(worker.actor._actor_id.hex())


def _result(reference: Any, timeout: float = 0.5) -> Any:
    """What a call returned, or None: its worker is dead or does not answer."""
    try:
        return ray.get(reference, timeout=timeout)
    except (RayError, GetTimeoutError):
        return None
