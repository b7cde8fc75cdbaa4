"""The process of one worker: Ray Train's worker actor, with SIGTERM as a notice and ranks from the coordinator.

`ray_contract.CONTRACT` lists the private names of Ray that are used.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.train import ControllerError
from ray.train.v2._internal.execution.context import DistributedContext
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker

from tidewheel.elastic import warm
from tidewheel.elastic.worker import notice
from tidewheel.errors import root_cause
from tidewheel.train.cuda_environment import prepare_environment


class LostWorkerError(RuntimeError):
    """A worker's process or node has ended."""


class SilentWorkerError(LostWorkerError):
    """A worker's process exists and has not answered for a long time."""


class ElasticRayTrainWorker(RayTrainWorker):
    """Ray Train's worker, which takes SIGTERM as notice that its machine will be preempted.

    It imports what training needs while other processes start.
    """

    def __init__(self) -> None:
        super().__init__()
        if ray.get_gpu_ids():
            prepare_environment()  # before anything starts CUDA
        warm.begin_imports()

    def identify(self) -> tuple[str, str]:
        """Return the ids of the actor and of its node; from then on SIGTERM is a notice."""
        signal.signal(signal.SIGTERM, lambda *_: notice())  # actor methods run in the main thread, where this must be
        context: Any = ray.get_runtime_context()
        return context.get_actor_id(), context.get_node_id()

    def begin(self, train_run_context: Any, train_fn_ref: Any, index: int) -> None:
        """Start the training function in a thread.

        Args:
            train_run_context: Ray Train's settings of the run.
            train_fn_ref: Ray Train's reference to the training function.
            index: number of the worker in the group, for Ray Train's logs. Its rank comes from the coordinator.
        """
        alone = DistributedContext(world_rank=index, world_size=index + 1, local_rank=0, local_world_size=1,
                                   node_rank=0)
        nothing: Any = None  # workers report nothing through Ray Train: they need no barrier, storage or controller
        self.init_train_context(train_run_context=train_run_context, distributed_context=alone,
                                synchronization_actor=nothing, storage_context=nothing, worker_callbacks=[],
                                controller_actor=nothing)
        self.run_train_fn(train_fn_ref)


@dataclass
class Starting:
    """A worker process that is coming up."""

    actor: Any
    node: str
    identity: Any
    """Reference to the actor's answer to `identify`."""
    began: float
    crowded: bool = False
    """Whether others held the node's resources when the start was asked for."""


@dataclass
class Worker:
    """A worker process that is up."""

    actor: Any
    name: str
    """Id of the actor, by which the coordinator knows the worker."""
    node: str
    answer: Any = field(default=None, repr=False)
    """Reference to the answer to a poll under way."""
    asked_at: float = 0.0

    def poll(self) -> Any:
        """Return the reference to the answer of the poll under way, after starting one if there is none."""
        if self.answer is None:
            self.answer = self.actor.poll_status.remote()
            self.asked_at = time.monotonic()
        return self.answer


def actor_resources(needs: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of `ray.remote` that reserve the resources `needs`, by Ray's names."""
    rest = dict(needs)
    return {"num_cpus": rest.pop("CPU", 0), "num_gpus": rest.pop("GPU", 0), "memory": rest.pop("memory", None),
            "resources": rest}


def train_environment() -> dict[str, str]:
    """Return the settings of Ray Train in this process's environment, for the processes it starts."""
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_TRAIN_")}


def unwrapped(error: BaseException) -> BaseException:
    """Return the error inside Ray's wrappers: ours if there is one, else the one first raised."""
    if isinstance(error, ControllerError):
        return unwrapped(error.controller_failure)
    inner = error.args[0] if error.args and type(error).__module__.startswith("ray.") else None
    if isinstance(inner, BaseException):  # Ray Train's wrapper of an error with its traceback
        return unwrapped(inner)
    return root_cause(error)


def one_line(error: BaseException) -> str:
    """Return the class and text of an error in one line, for an event."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def has_ended(error: BaseException | None) -> bool:
    """Return whether an error says that a worker's process is gone."""
    return isinstance(error, LostWorkerError) and not isinstance(error, SilentWorkerError)


def result(reference: Any, timeout: float = 0.5) -> Any:
    """Return the result of a call, or None if its worker is dead or does not answer in time."""
    try:
        return ray.get(reference, timeout=timeout)
    except (RayError, GetTimeoutError):
        return None
