"""What `ray_adapter` and `ray_workers` need of Ray's internals, and a check that the installed Ray has it.

Upstream changes these names without notice; here that becomes one clear message instead of a fault in the middle of
a run. Kept apart from them, whose imports fail when a name is gone.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from tidewheel.errors import ClusterError

SUPPORTED_RAY = "2.60.0"
_INTERNAL = "ray.train.v2._internal"

#: Module, dotted attribute, and the parameters it must take; None: only that it is there.
CONTRACT: tuple[tuple[str, str, tuple[str, ...] | None], ...] = (
    ("ray.train.v2.api.data_parallel_trainer", "DataParallelTrainer._initialize_and_run_controller",
     ("self", "controller_init_kwargs")),
    (f"{_INTERNAL}.execution.controller.controller", "TrainController.__init__",
     ("self", "train_fn_ref", "train_run_context", "scaling_policy", "failure_policy", "callbacks",
      "validation_config")),
    (f"{_INTERNAL}.execution.controller.controller", "TrainController.abort", ("self",)),
    (f"{_INTERNAL}.execution.controller.controller", "TrainController.worker_group_cls", None),
    (f"{_INTERNAL}.execution.controller", "TrainController.run", ("self",)),
    (f"{_INTERNAL}.execution.controller", "TrainController.get_result", ("self",)),
    (f"{_INTERNAL}.callbacks.datasets", "DatasetsCallback", None),
    (f"{_INTERNAL}.callbacks.placement_group_callback", "PlacementGroupCleanerCallback", None),
    (f"{_INTERNAL}.execution.scaling_policy", "ScalingPolicy.__init__", ("self", "scaling_config")),
    (f"{_INTERNAL}.execution.scaling_policy", "ScalingPolicy.make_decision_for_non_running_worker_group", ("self",)),
    (f"{_INTERNAL}.execution.scaling_policy", "ScalingPolicy.make_decision_for_running_worker_group",
     ("self", "worker_group_state", "worker_group_status")),
    (f"{_INTERNAL}.execution.scaling_policy", "ScalingPolicy._get_num_workers_for_resource_request", ("self",)),
    (f"{_INTERNAL}.execution.scaling_policy", "ScalingPolicy._maybe_send_resource_request", ("self",)),
    (f"{_INTERNAL}.execution.scaling_policy", "ScalingPolicy.after_controller_start", ("self", "train_run_context")),
    (f"{_INTERNAL}.execution.scaling_policy", "ResizeDecision.__init__",
     ("self", "num_workers", "resources_per_worker")),
    (f"{_INTERNAL}.execution.scaling_policy", "NoopDecision", None),
    (f"{_INTERNAL}.execution.scaling_policy", "ScalingDecision", None),
    (f"{_INTERNAL}.execution.failure_handling", "FailurePolicy.make_decision", ("self", "training_failed_error")),
    (f"{_INTERNAL}.execution.failure_handling", "FailureDecision.RETRY", None),
    (f"{_INTERNAL}.execution.failure_handling", "FailureDecision.RAISE", None),
    (f"{_INTERNAL}.execution.worker_group", "WorkerGroup.__init__",
     ("self", "train_run_context", "worker_group_context", "callbacks")),
    (f"{_INTERNAL}.execution.worker_group", "WorkerGroup._start", ("self",)),
    (f"{_INTERNAL}.execution.worker_group.worker_group", "SynchronizationActor", None),
    (f"{_INTERNAL}.execution.worker_group", "WorkerGroup._create_placement_group",
     ("self", "scaling_config", "worker_group_context")),
    (f"{_INTERNAL}.execution.worker_group", "WorkerGroup._create_workers",
     ("self", "num_workers", "placement_group", "resources_per_worker")),
    (f"{_INTERNAL}.execution.worker_group", "WorkerGroup._assign_worker_ranks",
     ("workers", "starting_world_rank", "world_size")),
    (f"{_INTERNAL}.execution.worker_group", "WorkerGroup._init_train_context", ("self", "workers", "sync_actor")),
    (f"{_INTERNAL}.execution.worker_group", "WorkerGroup._get_worker_runtime_env", ("custom_runtime_env",)),
    (f"{_INTERNAL}.execution.worker_group", "WorkerGroup._poll_workers_and_collect_errors", ("self", "timeout")),
    (f"{_INTERNAL}.execution.worker_group", "WorkerGroup.get_worker_group_state", ("self",)),
    (f"{_INTERNAL}.execution.worker_group", "WorkerGroup.shutdown", ("self",)),
    (f"{_INTERNAL}.execution.worker_group", "WorkerGroup.abort", ("self",)),
    (f"{_INTERNAL}.execution.worker_group.placement_group_handle", "PlacementGroupHandle.placement_group", None),
    (f"{_INTERNAL}.execution.worker_group.placement_group_handle", "PlacementGroupHandle.wait",
     ("self", "timeout_seconds")),
    (f"{_INTERNAL}.execution.worker_group.poll", "WorkerStatus.__init__",
     ("self", "running", "error", "training_report", "return_value")),
    (f"{_INTERNAL}.execution.worker_group.worker", "RayTrainWorker.__init__", ("self",)),
    (f"{_INTERNAL}.execution.worker_group.worker", "RayTrainWorker.run_train_fn", ("self", "train_fn_ref")),
    (f"{_INTERNAL}.execution.worker_group.worker", "RayTrainWorker.poll_status", ("self",)),
    (f"{_INTERNAL}.execution.worker_group.worker", "RayTrainWorker.get_metadata", ("self",)),
    (f"{_INTERNAL}.execution.worker_group.worker", "Worker.__init__", ("self", "actor", "metadata", "resources")),
    (f"{_INTERNAL}.execution.worker_group.worker", "ActorMetadata.__init__", ("self", "hostname", "node_id")),
    (f"{_INTERNAL}.execution.checkpoint.report_handler", "ReportCallbackHandler.set_required_ranks", ("self", "ranks")),
    (f"{_INTERNAL}.execution.checkpoint.report_handler", "ReportCallbackHandler.after_worker_group_start",
     ("self", "worker_group")),
    (f"{_INTERNAL}.util", "bundle_to_remote_args", ("bundle",)),
    (f"{_INTERNAL}.exceptions", "UserExceptionWithTraceback.__init__", ("self", "exc", "traceback_str")),
    (f"{_INTERNAL}.exceptions", "WorkerGroupStartupTimeoutError", None),
    (f"{_INTERNAL}.exceptions", "WorkerHealthCheckFailedError", None),
    (f"{_INTERNAL}.exceptions", "WorkerHealthCheckTimeoutError", None),
    (f"{_INTERNAL}.exceptions", "InsufficientClusterResourcesError", None),
    ("ray.train.v2.api.exceptions", "ControllerError.__init__", ("self", "controller_failure")),
    ("ray.train.v2.api.exceptions", "WorkerGroupError.__init__", ("self", "error_message", "worker_failures")),
    (f"{_INTERNAL}.constants", "HEALTH_CHECK_INTERVAL_S_ENV_VAR", None),
    (f"{_INTERNAL}.constants", "get_env_vars_to_propagate", ()),
    (f"{_INTERNAL}.constants", "ENABLE_PREEMPTION_WATCHER_ENV_VAR", None),
    ("ray._private.state", "GlobalState.get_draining_nodes", ("self",)),
    ("ray._private.state", "GlobalState.get_max_resources_from_cluster_config", ("self",)),
    ("ray._private.state", "available_resources_per_node", None),
)


def check_ray() -> None:
    """Hold the installed Ray to `CONTRACT`.

    Raises:
        ClusterError: another release, or a name or parameter that is gone; all that differs is named.
    """
    import ray

    problems = []
    if ray.__version__ != SUPPORTED_RAY:
        problems.append(f"version {ray.__version__} instead of {SUPPORTED_RAY}")
    for module, attribute, parameters in CONTRACT:
        problems += _differences(module, attribute, parameters)
    if problems:
        raise ClusterError("this Ray does not fit: " + "; ".join(problems), where="ray",
                           mend=f"pip install 'ray[default,data,train]=={SUPPORTED_RAY}'")


def _differences(module: str, attribute: str, parameters: tuple[str, ...] | None) -> list[str]:
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return [f"{module}.{attribute} is gone"]
    if parameters is None:
        return []
    missing = [name for name in parameters if name not in inspect.signature(found).parameters]
    return [f"{module}.{attribute} no longer takes {', '.join(missing)}"] if missing else []
