"""The private names of Ray that Tidewheel's elastic training needs, and a check that the installed Ray has them.

Ray changes such names without notice. The check turns that into one clear message before a run starts. This module
imports nothing of Ray at import time, because the modules that use the names fail to import when one is gone.

`tests/unit/elastic/test_ray_contract.py` holds the list to what the package uses: a missing name fails, and so does one
that nothing uses. `make compat` runs the elastic tests on every release in KNOWN_RELEASES.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, NamedTuple

from tidewheel.errors import ClusterError

KNOWN_RELEASES = ("2.58.1", "2.59.0", "2.60.0")
"""Releases of Ray on which `make compat` passes; the last is the one that the package installs."""


class Name(NamedTuple):
    """A private name of Ray."""

    module: str
    attribute: str
    """Dotted path inside the module."""
    parameters: tuple[str, ...] | None = None
    """Parameters that it must take; None: it only has to be there."""


_EXECUTION = "ray.train.v2._internal.execution"
_CONTROLLER = f"{_EXECUTION}.controller"
_SCALING = f"{_EXECUTION}.scaling_policy"
_FAILURES = f"{_EXECUTION}.failure_handling"
_GROUP = f"{_EXECUTION}.worker_group"
_WORKER = f"{_GROUP}.worker"

USED: tuple[Name, ...] = (
    Name("ray.train.v2.api.data_parallel_trainer", "DataParallelTrainer._initialize_and_run_controller",
         ("self", "controller_init_kwargs")),
    Name(_CONTROLLER, "TrainController.__init__",
         ("self", "train_fn_ref", "train_run_context", "scaling_policy", "failure_policy", "callbacks",
          "validation_config")),
    Name(_CONTROLLER, "TrainController.worker_group_cls"),
    Name(_CONTROLLER, "TrainController.run", ("self",)),
    Name(_CONTROLLER, "TrainController.get_result", ("self",)),
    Name(_SCALING, "FixedScalingPolicy.__init__", ("self", "scaling_config")),
    Name(_SCALING, "FixedScalingPolicy.after_controller_start", ("self", "train_run_context")),
    Name(_SCALING, "FixedScalingPolicy._maybe_send_resource_request", ("self",)),
    Name(_FAILURES, "FailureDecision.RETRY"),
    Name(_FAILURES, "FailureDecision.RAISE"),
    Name(f"{_EXECUTION}.context", "DistributedContext.__init__",
         ("self", "world_rank", "world_size", "local_rank", "local_world_size", "node_rank")),
    Name(_WORKER, "RayTrainWorker.init_train_context",
         ("self", "train_run_context", "distributed_context", "synchronization_actor", "storage_context",
          "worker_callbacks", "controller_actor")),
    Name(_WORKER, "RayTrainWorker.run_train_fn", ("self", "train_fn_ref")),
    Name(_WORKER, "RayTrainWorker.poll_status", ("self",)),
    Name(_GROUP, "WorkerStatus.__init__", ("self", "running", "error", "return_value")),
    Name(_GROUP, "WorkerGroupPollStatus.__init__", ("self", "worker_statuses")),
    Name("ray._private.state", "GlobalState.get_draining_nodes", ("self",)),
    Name("ray._private.worker", "global_worker"),
    Name("ray.core.generated.autoscaler_pb2", "GetClusterStatusReply"),
)
"""Imported, called or overridden."""

PROVIDED: tuple[Name, ...] = (
    Name(_FAILURES, "FailurePolicy.make_decision", ("self", "training_failed_error")),
    Name(_GROUP, "WorkerGroup.create", ("train_run_context", "worker_group_context", "callbacks")),
    Name(_GROUP, "WorkerGroup.get_workers", ("self",)),
    Name(_GROUP, "WorkerGroup.get_latest_poll_status", ("self",)),
    Name(_GROUP, "WorkerGroup.get_worker_group_state", ("self",)),
    Name(_GROUP, "WorkerGroup.poll_status", ("self", "timeout")),
    Name(_GROUP, "WorkerGroup.shutdown", ("self",)),
    Name(_GROUP, "WorkerGroupContext.__init__", ("self", "train_fn_ref")),
)
"""What Ray Train's controller calls on our failure policy and our group of workers, and gives them."""

CONTRACT = (*USED, *PROVIDED)


def check_ray() -> None:
    """Hold the installed Ray to `CONTRACT`.

    Raises:
        ClusterError: the release is not known to work, or a name or parameter is gone. The message lists all of it.
    """
    import ray

    problems = []
    if ray.__version__ not in KNOWN_RELEASES:
        problems.append(f"version {ray.__version__}; known to work: {', '.join(KNOWN_RELEASES)}")
    for name in CONTRACT:
        problems += _differences(name)
    if problems:
        raise ClusterError("this Ray does not fit: " + "; ".join(problems), where="ray",
                           fix=f"pip install 'ray[default,data,train]=={KNOWN_RELEASES[-1]}'")


def _differences(name: Name) -> list[str]:
    try:
        value: Any = importlib.import_module(name.module)
        for part in name.attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        return [f"{name.module}.{name.attribute} is gone"]
    if name.parameters is None:
        return []
    present = inspect.signature(value).parameters
    missing = [parameter for parameter in name.parameters if parameter not in present]
    return [f"{name.module}.{name.attribute} no longer takes {', '.join(missing)}"] if missing else []
