"""Ray Data without its two actors, in a cluster that neither grows nor has a dashboard.

Before the first task Ray Data waits for an actor that shares a growing cluster's nodes between data sets, and one that
collects a dashboard's statistics. Each is a process that imports all of Ray Data: seconds before anything happens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tidewheel.autoscaler import can_grow


@contextlib.contextmanager
def without_idle_actors() -> Iterator[None]:
    """Let data sets of the block do without the actors that have nothing to do in this cluster."""
    if _has_dashboard():
        yield
        return
    from ray.data._internal.stats import _StatsManager

    names = ("update_execution_metrics", "update_iteration_metrics", "register_dataset_to_stats_actor")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(_replaced(_StatsManager, name, staticmethod(_tell_nobody)))
        if not can_grow():
            from ray.data._internal.cluster_autoscaler import rate_based_cluster_autoscaler as rate_based

            stack.enter_context(_replaced(rate_based, "DefaultAutoscalingCoordinator", _WholeCluster))
        yield


def _has_dashboard() -> bool:
    """Return whether an API server has told of itself; a cluster of our own without a dashboard has none."""
    from ray._private import ray_constants
    from ray.experimental import internal_kv

    return bool(internal_kv._internal_kv_exists(ray_constants.DASHBOARD_ADDRESS,
                                                namespace=ray_constants.KV_NAMESPACE_DASHBOARD))


def _tell_nobody(*_: Any, **__: Any) -> None:
    """Stand in for a call of the statistics actor."""


class _WholeCluster:
    """Give a data set what all nodes have, as Ray's coordinator does where it is alone; Ray's scheduler still decides
    what runs. It asks for no node, as none can come."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def request_resources(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is nobody to ask."""

    def cancel_request(self) -> None:
        """Do nothing."""

    def get_reserved_resources(self) -> dict[str, dict[str, float]]:
        """Return the resources of each node that can take tasks, by its id."""
        import ray

        return {row["NodeID"]: row["Resources"] for row in ray.nodes()
                if row["Alive"] and _takes_tasks(row["Resources"])}


def _takes_tasks(resources: dict[str, float]) -> bool:
    """Return whether tasks may run on a node: a head without CPUs and GPUs has an object store that none can use."""
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
