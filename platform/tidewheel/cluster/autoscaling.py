"""Ray's own autoscaler on one machine: node groups that grow when work asks for nodes and shrink when they are idle.

The autoscaler (v2, as KubeRay runs it) is the real one; only the "cloud" is Ray's provider that starts raylets on this
machine. So what asks for capacity (a pipeline's tasks, an elastic training's wish) is tested with what will answer it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidewheel.cluster.groups import Group

HEAD_ID = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"  # that of Ray's provider
HEAD_TYPE = "ray.head.default"
#: Of the head's processes and of the autoscaler: what Ray's own test cluster sets.
HEAD_ENVIRONMENT = {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
                    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID}
ENVIRONMENT = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}


@dataclass(frozen=True)
class AutoscaledGroup:
    """Equal nodes, from `least` to `most` of them."""

    name: str
    least: int = 0
    most: int = 2
    cpus: float = 1.0
    resources: dict[str, float] = field(default_factory=dict)

    def described(self, object_store_bytes: int) -> dict[str, Any]:
        """As JSON values, for the keeper."""
        labels = Group(self.name).node_labels
        return {"name": self.name, "least": self.least, "most": self.most, "labels": labels, "resources": {
            "CPU": self.cpus, "object_store_memory": object_store_bytes, **self.resources}}


def autoscaler_config(gcs_address: str, groups: Sequence[Mapping[str, Any]], idle_seconds: float) -> dict[str, Any]:
    """The autoscaler's configuration (a cluster launcher file's values) for groups of `AutoscaledGroup.described`."""
    types = {group["name"]: {"resources": dict(group["resources"]), "labels": dict(group["labels"]), "node_config": {},
                             "min_workers": group["least"], "max_workers": group["most"]} for group in groups}
    types[HEAD_TYPE] = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    return {
        "cluster_name": "tidewheel-local", "max_workers": sum(group["most"] for group in groups),
        "idle_timeout_minutes": idle_seconds / 60, "upscaling_speed": 100.0,
        "provider": {"type": "fake_multinode", "gcs_address": gcs_address, "launch_multiple": True,
                     "head_node_id": HEAD_ID},
        "available_node_types": types, "head_node_type": HEAD_TYPE, "auth": {}, "docker": {},
        "initialization_commands": [], "setup_commands": [], "head_setup_commands": [], "worker_setup_commands": [],
        "head_start_ray_commands": [], "worker_start_ray_commands": [], "file_mounts": {},
        "cluster_synced_files": [], "file_mounts_sync_continuously": False, "rsync_exclude": [], "rsync_filter": []}
