"""Run Ray Data without its two actors in a cluster that has neither an autoscaler nor a dashboard.

Before the first task, Ray Data waits for two actors: one shares the nodes of an autoscaling cluster between data sets,
one collects statistics for the dashboard. Each is a process that imports all of Ray Data, which takes seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tidewheel.autoscaler import can_grow


@contextlib.contextmanager
def without_idle_actors() -> Iterator[None]:
    """Run the data sets of the block without the actors that have nothing to do in this cluster."""
    if _has_dashboard():
        yield
        return
    from ray.data._internal.stats import _StatsManager

    names = ("update_execution_metrics", "update_iteration_metrics", "register_dataset_to_stats_actor")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(_replaced(_StatsManager, name, staticmethod(_ignore)))
        if not can_grow():
            from ray.data._internal.cluster_autoscaler import rate_based_cluster_autoscaler as rate_based

            stack.enter_context(_replaced(rate_based, "DefaultAutoscalingCoordinator", _WholeCluster))
        yield


def _has_dashboard() -> bool:
    """Return whether a dashboard's API server has registered its address."""
    from ray._private import ray_constants
    from ray.experimental import internal_kv

    return bool(internal_kv._internal_kv_exists(ray_constants.DASHBOARD_ADDRESS,
                                                namespace=ray_constants.KV_NAMESPACE_DASHBOARD))


def _ignore(*_: Any, **__: Any) -> None:
    """Replace a call of the statistics actor."""


class _WholeCluster:
    """Autoscaling coordinator that gives a data set the resources of all nodes, as Ray's does for a single data set.

    Ray's scheduler still decides what runs. It requests no nodes, since the cluster cannot grow.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def request_resources(self, *_: Any, **__: Any) -> None:
        """Do nothing: the cluster cannot grow."""

    def cancel_request(self) -> None:
        """Do nothing."""

    def get_reserved_resources(self) -> dict[str, dict[str, float]]:
        """Return the resources of each node that can run tasks, by node id."""
        import ray

        return {row["NodeID"]: row["Resources"] for row in ray.nodes()
                if row["Alive"] and _takes_tasks(row["Resources"])}


def _takes_tasks(resources: dict[str, float]) -> bool:
    """Return whether tasks can run on a node: a head node without CPUs and GPUs has only an object store."""
    is_head = "node:__internal_head__" in resources
    return not is_head or bool(resources.get("CPU") or resources.get("GPU"))


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
