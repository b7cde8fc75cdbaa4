"""The cloud of an autoscaled local cluster: Ray's fake node provider, with nodes like those of `supervisor`.

The autoscaler's process loads it. Ray's own fake nodes listen at the machine's outside address and outlive a killed
autoscaler; these have a loopback address each and end with it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ray._private.node import Node
from ray._private.parameter import RayParams
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_WORKER,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

from tidewheel.cluster.supervisor import MANY_LOOPBACKS


class LoopbackNodes(FakeMultiNodeProvider):
    """Ray's fake node provider with nodes on loopback."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._seen: set[str] = set()
        """Groups that have had a node."""

    def _create_node_with_resources_and_labels(self, node_config: Mapping[str, Any], tags: Mapping[str, str],
                                               count: int, resources: Mapping[str, float],
                                               labels: Mapping[str, str]) -> None:
        node_type = tags[TAG_RAY_USER_NODE_TYPE]
        left = dict(resources)
        if node_type in self._seen:
            time.sleep(node_config["seconds_apart"])
        self._seen.add(node_type)
        with self.lock:
            node_id = self._next_hex_node_id()
            number = int(node_id[-5:])
        parameters: dict[str, Any] = {
            "gcs_address": self._gcs_address, "temp_dir": self.provider_config["temp_dir"], "min_worker_port": 0,
            "max_worker_port": 0, "dashboard_agent_listen_port": 0, "include_log_monitor": False,
            "node_ip_address": f"127.1.{number // 250}.{number % 250 + 1}" if MANY_LOOPBACKS else None,
            "runtime_env_dir_name": f"runtime_{node_type}_{number}", "num_cpus": left.pop("CPU", 0),
            "num_gpus": left.pop("GPU", 0), "memory": left.pop("memory", None),
            "object_store_memory": left.pop("object_store_memory", None), "resources": left, "labels": dict(labels),
            "env_vars": {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": node_id, "RAY_CLOUD_INSTANCE_ID": node_id,
                         "RAY_NODE_TYPE_NAME": node_type}}
        known = {TAG_RAY_NODE_KIND: NODE_KIND_WORKER, TAG_RAY_USER_NODE_TYPE: node_type, TAG_RAY_NODE_NAME: node_id,
                 TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE, **tags}
        with self.lock:  # before the raylet starts: Ray ends a raylet that no entry explains
            entry: dict[str, Any] = {"tags": known, "node": None}
            self._nodes[node_id] = entry
        node: Any = None
        try:
            node = Node(RayParams(**parameters), head=False, shutdown_at_exit=False, spawn_reaper=True)
        finally:
            with self.lock:
                kept = node is not None and node_id in self._nodes
                if kept:
                    entry["node"] = node
                else:
                    self._nodes.pop(node_id, None)
            if node is not None and not kept:  # terminated while it was starting
                self._terminate_node({"node": node})

    def terminate_node(self, node_id: str) -> None:
        """End a node. A node that is still starting ends as soon as it is up."""
        with self.lock:
            entry = self._nodes.pop(node_id, None)
        if entry is not None and entry["node"] is not None:
            self._terminate_node(entry)
