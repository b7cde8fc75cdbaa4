"""Whether the cluster may get more nodes: asked before work is refused for want of them."""

from __future__ import annotations

import time
from typing import Any

START_SECONDS = 30.0
"""An autoscaler that was started with the cluster has told of itself by then."""
ANSWER_SECONDS = 10.0


def can_grow(patience_seconds: float = 0.0) -> bool:
    """Whether an autoscaler (v2: KubeRay's, `ray up`'s) runs that may add nodes.

    Its nodes know their type from the start; the autoscaler itself tells of itself a second or two later. On a cluster
    that young the answer waits up to `patience_seconds`. (`get_max_resources_from_cluster_config`, which Ray's own
    libraries ask, is None on open-source Ray 2.60: nothing there calls `report_cluster_config`.)
    """
    import ray
    from ray.core.generated import autoscaler_pb2

    messages: Any = autoscaler_pb2
    until = time.monotonic() + patience_seconds
    while True:
        worker: Any = ray._private.worker.global_worker
        status = messages.GetClusterStatusReply.FromString(
            worker.gcs_client.get_cluster_status(timeout_s=ANSWER_SECONDS))
        if not any(node.ray_node_type_name for node in status.cluster_resource_state.node_states):
            return False
        if status.autoscaling_state.autoscaler_state_version > 0:
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.2)
