"""The elastic trainer: Ray Train's trainer and controller, with our group of workers and our judgement of failures.

Ray Train has no public way to keep a group of workers whose members come and go, or to choose what a failure means.
`ElasticTrainer` gives its controller the group (`ray_group`) and the failure policy. `ray_contract.CONTRACT` lists
every private name used here; call `ray_contract.check_ray` before importing this module.
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
from ray.train import RunConfig, ScalingConfig, TrainingFailedError, WorkerGroupError
from ray.train.backend import BackendConfig
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidewheel.autoscaler import can_grow
from tidewheel.elastic.faults import MISTAKES
from tidewheel.elastic.policy import Recovery
from tidewheel.elastic.ray_group import WorkerGroups
from tidewheel.elastic.ray_process import LostWorkerError, one_line, train_environment, unwrapped
from tidewheel.elastic.ray_workers import Workers
from tidewheel.errors import ClusterError, TidewheelError
from tidewheel.train.elastic_config import ElasticConfig

TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",  # Ray: 2. How soon a lost worker is replaced
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # the coordinator handles drains: it saves before the deadline
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # the run's logs/ keep what is printed; Ray would make it a record as well
}
"""Settings of Ray Train for the driver, the controller and the workers, where the user has not set them."""

LOOK_SECONDS = 10.0
"""Least time between two questions whether the cluster has an autoscaler."""


class AutoscalerRequests(FixedScalingPolicy):
    """Ray Train's policy of a fixed number of workers, which asks the autoscaler only if there is one.

    Asking starts an actor that imports Ray Data, seconds of processor time. The number asked for is the largest; the
    group begins with any legal number (`ray_group.WorkerGroups.create`).

    Args:
        scaling: what to ask the autoscaler for.
    """

    def __init__(self, scaling: Any) -> None:
        super().__init__(scaling)
        self._run_context: Any = None
        self._asking = False
        self._look_at = 0.0

    def after_controller_start(self, train_run_context: Any) -> None:
        """Ask the autoscaler for nodes if there is one."""
        self._run_context = train_run_context
        self._maybe_send_resource_request()

    def _maybe_send_resource_request(self) -> None:
        if self._asking:
            super()._maybe_send_resource_request()
        elif time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            if can_grow():
                super().after_controller_start(self._run_context)
                self._asking = True


class RunFailures:
    """Ray Train's failure policy: carry out what the coordinator decides.

    Args:
        workers: the run's worker processes.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        """Return whether Ray Train restarts the group, and keep or end its processes."""
        failure = Failure.of(training_failed_error)
        answer = self._workers.coordinator.failed.remote(
            failure.text, list(failure.ranks), failure.retryable, failure.lost)
        recovery = Recovery(ray.get(answer, timeout=60))
        self._workers.keep = recovery is Recovery.KEPT
        if recovery is not Recovery.KEPT:
            self._workers.discard()
        return FailureDecision.RAISE if recovery is Recovery.NONE else FailureDecision.RETRY


@dataclass(frozen=True)
class Failure:
    """What went wrong with a group of workers."""

    retryable: bool
    ranks: tuple[int, ...]
    """Numbers, in Ray Train's group, of the workers that failed."""
    text: str
    lost: bool = False
    """Workers were lost, and none raised an error of its own."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Judge an error of Ray Train.

        Our own errors and mistakes in the code are not retried. A lost worker is, and so is what its peers raise when a
        collective breaks (RuntimeError and OSError).
        """
        if isinstance(error, WorkerGroupError):
            failures = list(error.worker_failures.values())
            causes = [unwrapped(failure) for failure in failures]
            lost = [failure for failure in failures if isinstance(failure, RayActorError | LostWorkerError)]
            ours = [cause for cause in causes if isinstance(cause, TidewheelError)]
            mistakes = [] if lost else [cause for cause in causes if isinstance(cause, MISTAKES)]
            shown = [*ours, *mistakes, *lost, *causes, error][0]
            return cls(retryable=not ours and not mistakes, ranks=tuple(error.worker_failures), text=one_line(shown),
                       lost=bool(lost) and not ours)
        cause = unwrapped(error)
        return cls(retryable=not isinstance(cause, TidewheelError), ranks=(), text=one_line(cause))


class ElasticController(TrainController):
    """Ray Train's controller with our workers and our judgement of failures.

    Args:
        elastic: resources of a worker, and limits on the number of workers.
        sizes: legal numbers of workers.
        coordinator: handle of the run's coordinator.
        scaling: what to ask an autoscaler for.
        early: workers' actors that the driver has started, and their nodes.
        ray_train: what Ray Train gives its own controller.
    """

    def __init__(self, *, elastic: ElasticConfig, sizes: tuple[int, ...], coordinator: Any, scaling: Any,
                 early: list[tuple[Any, str]], **ray_train: Any) -> None:
        workers = Workers(elastic, sizes, coordinator)
        workers.early = early
        groups: Any = WorkerGroups(workers)
        self.worker_group_cls = groups  # the controller only calls `create` on it
        # Ray Train's callbacks serve Ray Data, placement groups and reports. The workers use none of them.
        own: dict[str, Any] = {"scaling_policy": AutoscalerRequests(scaling), "failure_policy": RunFailures(workers),
                               "callbacks": []}
        super().__init__(**{**ray_train, **own})


class ElasticTrainer(DataParallelTrainer):
    """Ray Train's trainer with our controller. Ctrl-C ends it as it ends any program, together with the workers.

    Args:
        worker: the training function of a worker.
        settings: its argument.
        elastic: resources of a worker, and limits on the number of workers.
        sizes: legal numbers of workers.
        coordinator: handle of the run's coordinator.
        name: id of the run.
        storage_path: folder of the driver's machine for Ray Train's bookkeeping, which holds no checkpoint.
    """

    def __init__(self, worker: Callable[[dict[str, Any]], Any], settings: dict[str, Any], *, elastic: ElasticConfig,
                 sizes: tuple[int, ...], coordinator: Any, name: str, storage_path: str) -> None:
        make_scaling: Any = ScalingConfig  # its type is that of an older Ray Train
        self._scaling = make_scaling(num_workers=max(sizes), resources_per_worker=elastic.needs,
                                     use_gpu=bool(elastic.gpus_per_worker),
                                     label_selector=elastic.placement.selector or None)
        run_config: Any = RunConfig(name=name, storage_path=storage_path)
        super().__init__(worker, train_loop_config=settings, backend_config=BackendConfig(),  # process groups are ours
                         scaling_config=self._scaling, run_config=run_config)
        self._elastic = elastic
        self._sizes = sizes
        self._coordinator = coordinator
        self._controller: Any = None
        self._early: list[tuple[Any, str]] = []

    def _initialize_and_run_controller(self, **controller_init_kwargs: Any) -> Any:
        on_this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        environment = {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0", **train_environment()}
        actor: Any = ray.remote(ElasticController)
        actor = actor.options(num_cpus=0, scheduling_strategy=on_this_node, runtime_env={"env_vars": environment})
        if not self._early:
            self.start_early()
        self._controller = actor.remote(elastic=self._elastic, sizes=self._sizes, coordinator=self._coordinator,
                                        scaling=self._scaling, early=self._early, **controller_init_kwargs)
        ray.get(self._controller.run.remote())
        return ray.get(self._controller.get_result.remote())

    def start_early(self, *, placed: bool = False) -> None:
        """Start workers' processes before there is a controller; see `Workers.start_early`. `run` ends them."""
        self._early = Workers(self._elastic, self._sizes, self._coordinator).start_early(placed=placed)

    def run(self) -> Any:
        """Train to the end; return the value of rank 0's training function.

        Raises:
            TidewheelError: a worker or a policy raised it.
            ClusterError: the run failed for good.
        """
        try:
            with _environment(TRAIN_ENVIRONMENT):
                result: Any = self.fit()
                return result.return_value
        except TrainingFailedError as error:
            self._end_controller()
            raise _final(error) from error
        except BaseException:
            self._end_controller()
            raise
        finally:
            for actor, _ in self._early:  # this process owns them
                with contextlib.suppress(Exception):  # the run's outcome matters more; they end with this process
                    ray.kill(actor)
            self._early = []

    def _end_controller(self) -> None:
        """End the controller, and with it the actors that it owns: the workers."""
        if self._controller is not None:
            ray.kill(self._controller)


def _final(error: TrainingFailedError) -> BaseException:
    causes = [error] if not isinstance(error, WorkerGroupError) else list(error.worker_failures.values())
    for cause in map(unwrapped, causes):
        if isinstance(cause, TidewheelError):
            return cause
    failure = Failure.of(error)
    return ClusterError(f"training failed for good: {failure.text}", where="elastic",
                        fix="see the worker's trace above and events.jsonl; started again, the run continues from "
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
