"""The module that, with `ray_workers`, knows the inside of Ray Train.

Ray Train has no public way to choose the number of workers or what a failure means. `ElasticTrainer` replaces the
two policies that its controller is given, and the way it keeps its workers (`ray_workers`). Every internal name used
here is in `ray_contract.CONTRACT`; call `ray_contract.check_ray` before importing this module.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.train.backend import BackendConfig
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.exceptions import (
    InsufficientClusterResourcesError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import (
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
    ScalingPolicy,
)
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidewheel.autoscaler import can_grow
from tidewheel.elastic import layout, nodes
from tidewheel.elastic.faults import MISTAKES
from tidewheel.elastic.policy import Recovery
from tidewheel.elastic.ray_workers import Workers, one_line, unwrapped
from tidewheel.errors import ClusterError, TidewheelError
from tidewheel.placement import with_labels
from tidewheel.train.config import ElasticConfig

#: Read by the driver, the controller and the workers; what the user has set stays. Ray's defaults are in brackets.
TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",  # (2 s) how soon a lost worker's place is filled
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # drains are ours: it would restart at the deadline, unsaved
    "RAY_TRAIN_METRICS_ENABLED": "0",  # metrics.jsonl is ours
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # paths mean in a worker what they mean to the user
}

SETTLE_SECONDS = 10.0  # Ray's own death detection takes 1-2 s on a local cluster, longer with its defaults
IDLE_SECONDS = 0.5


class ElasticScaling(ScalingPolicy):
    """Workers for the nodes that are alive, stay, and answer; legal numbers only. What changes while a group runs is
    the coordinator's business."""

    def __init__(self, scaling: ScalingConfig, elastic: ElasticConfig, sizes: tuple[int, ...],
                 coordinator: Any, workers: Workers) -> None:
        super().__init__(scaling)
        self._workers = workers
        self._elastic, self._sizes, self._coordinator = elastic, sizes, coordinator
        self._waiting_since: float | None = None
        self._run_context: Any = None
        self._asking, self._look_again = False, 0.0
        self.distrust_totals = False
        """Set after a group found no place: others use the nodes too, so count what is free."""

    def after_controller_start(self, train_run_context: Any) -> None:
        self._run_context = train_run_context
        self._ask_autoscaler()

    def _ask_autoscaler(self) -> None:
        """Once there is one: else nobody would answer, and asking starts one more actor."""
        if self._asking:
            self._maybe_send_resource_request()
        elif time.monotonic() >= self._look_again:
            self._look_again = time.monotonic() + SETTLE_SECONDS
            if not can_grow():
                return
            super().after_controller_start(self._run_context)
            self._asking = True

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        lost = ray.get(self._coordinator.lost.remote())
        if lost is not None:
            raise lost
        self._ask_autoscaler()
        selector = self._elastic.placement.selector
        usable = nodes.usable(selector, SETTLE_SECONDS)
        if self.distrust_totals:
            places = layout.slots(nodes.free(selector), self._elastic.needs) + self._workers.held
        else:
            places = layout.slots([node.resources for node in usable], self._elastic.needs)
        size = layout.largest_fit(self._sizes, places)
        if size:
            self._waiting_since, self.distrust_totals = None, False
            return self._resize(size)
        self._wait_for_places()
        return NoopDecision()

    def make_decision_for_running_worker_group(self, worker_group_state: Any,
                                               worker_group_status: Any) -> ScalingDecision:
        self._ask_autoscaler()
        return NoopDecision()

    def _get_num_workers_for_resource_request(self) -> int:
        return max(self._sizes)

    def _resize(self, size: int) -> ResizeDecision:
        return ResizeDecision(num_workers=size, resources_per_worker=self.scaling_config._resources_per_worker_not_none)

    def _wait_for_places(self) -> None:
        """Sleeps: Ray asks again at once. Gives up in the end, so that nobody waits for ever."""
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
            self._coordinator.say.remote("waiting for nodes")
        if now - self._waiting_since > self._elastic.start_timeout_seconds:
            raise ClusterError(f"no node{with_labels(self._elastic.placement.selector)} could take {min(self._sizes)} "
                               f"worker(s) for {self._elastic.start_timeout_seconds:g} s", where="elastic.min_workers",
                               mend="add nodes and start the run again: it continues from its last checkpoint")
        time.sleep(IDLE_SECONDS)


class RunFailures(FailurePolicy):
    """The coordinator judges; here its answer is carried out."""

    def __init__(self, failure: FailureConfig, scaling: ElasticScaling, workers: Workers) -> None:
        super().__init__(failure)
        self._scaling, self._workers = scaling, workers

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        found = Failure.of(training_failed_error)
        recovery = Recovery(ray.get(self._workers.coordinator.failed.remote(
            found.text, list(found.ranks), found.retryable, found.placement, found.lost),
            timeout=60))
        if found.placement:
            self._scaling.distrust_totals = True
        self._workers.keep = recovery is Recovery.KEPT
        if recovery is not Recovery.KEPT:
            self._workers.discard()
        return FailureDecision.RAISE if recovery is Recovery.NONE else FailureDecision.RETRY


@dataclass(frozen=True)
class Failure:
    """What went wrong, in our words."""

    retryable: bool
    placement: bool
    """The workers found no place; nothing was running."""
    ranks: tuple[int, ...]
    text: str
    lost: bool = False
    """Workers were lost; none raised an error of its own."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Ours, and mistakes in the code, are not retried. A lost worker, and what its peers say about it
        (RuntimeError and OSError of a broken collective), are."""
        if isinstance(error, WorkerGroupError):
            failures = list(error.worker_failures.values())
            causes = [unwrapped(failure) for failure in failures]
            lost = [failure for failure in failures if isinstance(failure, _LOST)]
            ours = [cause for cause in causes if isinstance(cause, TidewheelError)]
            wrong = [] if lost else [cause for cause in causes if isinstance(cause, MISTAKES)]
            shown = [*ours, *wrong, *lost, *causes, error][0]
            return cls(not ours and not wrong, False, tuple(error.worker_failures), one_line(shown),
                       bool(lost) and not ours)
        cause = unwrapped(error)
        if isinstance(cause, WorkerGroupStartupTimeoutError):
            return cls(True, True, (), one_line(cause))
        fatal_controller = isinstance(cause, TidewheelError | InsufficientClusterResourcesError)
        return cls(not fatal_controller, False, (), one_line(cause))


_LOST = (RayActorError, WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError)


class ElasticController(TrainController):
    """Ray's controller with our policies and our workers."""

    def __init__(self, *, elastic: ElasticConfig, sizes: tuple[int, ...], coordinator: Any, **ray_train: Any) -> None:
        workers: Any = Workers(elastic, sizes, coordinator)
        scaling = ElasticScaling(ray_train["train_run_context"].scaling_config, elastic, sizes, coordinator, workers)
        self.worker_group_cls = workers  # all that is asked of it is `create`
        # Ray Data has no part in training; the callback for it starts an actor and imports all of it in each worker.
        callbacks = [one for one in ray_train["callbacks"]
                     if not isinstance(one, PlacementGroupCleanerCallback | DatasetsCallback)]
        super().__init__(**{**ray_train, "scaling_policy": scaling, "callbacks": callbacks,
                            "failure_policy": RunFailures(FailureConfig(), scaling, workers)})


class ElasticTrainer(DataParallelTrainer):
    """Ray Train's trainer with our controller. Ctrl-C ends it as it ends any program, with the workers."""

    def __init__(self, worker: Callable[[dict[str, Any]], Any], settings: dict[str, Any], *, elastic: ElasticConfig,
                 sizes: tuple[int, ...], coordinator: Any, name: str, storage_path: str) -> None:
        # Ray's own bookkeeping: never a checkpoint, so a folder on the driver's machine will do.
        run_config: Any = RunConfig(name=name, storage_path=storage_path)
        super().__init__(
            worker, train_loop_config=settings, backend_config=BackendConfig(),  # process groups are ours
            scaling_config=ScalingConfig(num_workers=max(sizes), resources_per_worker=elastic.needs,
                                         use_gpu=bool(elastic.gpus_per_worker),
                                         label_selector=elastic.placement.selector or None),  # for the autoscaler
            run_config=run_config)
        self._elastic, self._sizes, self._coordinator = elastic, sizes, coordinator
        self._controller: Any = None

    def _initialize_and_run_controller(self, **controller_init_kwargs: Any) -> Any:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        environment = {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0", **get_env_vars_to_propagate()}
        actor: Any = ray.remote(ElasticController)
        actor = actor.options(num_cpus=0, scheduling_strategy=here, runtime_env={"env_vars": environment})
        self._controller = actor.remote(elastic=self._elastic, sizes=self._sizes, coordinator=self._coordinator,
                                         **controller_init_kwargs)
        ray.get(self._controller.run.remote())
        return ray.get(self._controller.get_result.remote())

    def run(self) -> Any:
        """Train to the end; what rank 0's worker returned.

        Raises:
            TidewheelError: a worker or a policy raised it; passed on as it is.
            ClusterError: the run failed for good.
        """
        try:
            with _environment(TRAIN_ENVIRONMENT):
                result: Any = self.fit()
                return result.return_value
        except TrainingFailedError as error:
            raise _final(error) from error
        except BaseException:
            if self._controller is not None:
                with contextlib.suppress(Exception):  # ends this actor by design
                    ray.get(self._controller.abort.remote(), timeout=15)
            raise


def _final(error: TrainingFailedError) -> BaseException:
    causes = [error] if not isinstance(error, WorkerGroupError) else list(error.worker_failures.values())
    for cause in map(unwrapped, causes):
        if isinstance(cause, TidewheelError):
            return cause
    failure = Failure.of(error)
    return ClusterError(f"training failed for good: {failure.text}", where="elastic",
                        mend="see the worker's trace above and events.jsonl; started again, the run continues from "
                             "its last checkpoint")


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
