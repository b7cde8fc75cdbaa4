"""Check whether an autoscaler may add nodes, before a job is refused because the cluster is too small."""

from __future__ import annotations

import time
from typing import Any

START_SECONDS = 30.0
"""An autoscaler that starts with the cluster reports its state within this time."""
ANSWER_SECONDS = 10.0
"""Timeout of one status request to Ray."""


def can_grow(wait_seconds: float = 0.0) -> bool:
    """Return whether a running autoscaler may add nodes (version 2, which KubeRay and `ray up` start).

    Nodes of an autoscaled cluster have a node type from the start; the autoscaler reports its state a second or two
    later. Ray's own libraries ask `get_max_resources_from_cluster_config` instead, which is None in open-source Ray
    2.60, because nothing there calls `report_cluster_config`.

    Args:
        wait_seconds: how long to wait for the state of an autoscaler that has just started.
    """
    until = time.monotonic() + wait_seconds
    while True:
        status = cluster_status()
        if not any(node.ray_node_type_name for node in status.cluster_resource_state.node_states):
            return False
        if status.autoscaling_state.autoscaler_state_version > 0:
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.2)


def cluster_status() -> Any:
    """Return the connected cluster's state as its autoscaler sees it, Ray's `GetClusterStatusReply`."""
    import ray
    from ray.core.generated import autoscaler_pb2

    messages: Any = autoscaler_pb2
    worker: Any = ray._private.worker.global_worker
    return messages.GetClusterStatusReply.FromString(worker.gcs_client.get_cluster_status(timeout_s=ANSWER_SECONDS))
