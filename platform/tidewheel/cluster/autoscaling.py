"""Ray's own autoscaler on one machine: node groups that grow when work asks for nodes and shrink when they are idle.

The autoscaler is the real one (v2, as KubeRay runs it). Only the cloud is Ray's provider of fake nodes, which starts
raylets on this machine (`fake_cloud`). So the requests of a pipeline's tasks and of elastic training are tested against
the autoscaler that answers them in production.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidewheel.cluster.groups import Group

HEAD_ID = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
"""Ray's provider counts up from it for the ids of nodes."""
HEAD_TYPE = "ray.head.default"
#: Identity of the head's raylet in the cloud, which the autoscaler needs.
HEAD_ENVIRONMENT = {"RAY_CLOUD_INSTANCE_ID": HEAD_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
                    "RAY_NODE_TYPE_NAME": HEAD_TYPE}
#: Environment of the autoscaler's process. The provider requires the first; the second is the seconds between updates
#: (Ray's default: 5).
ENVIRONMENT = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
NODE_MEMORY = 2 << 30
"""Bytes of memory that each node offers, because Ray Data's tasks request some."""


@dataclass(frozen=True)
class AutoscaledGroup:
    """Group of `least` to `most` equal nodes."""

    name: str
    least: int = 0
    most: int = 2
    cpus: int = 1
    seconds_apart: float = 0.0
    """Seconds that each node but the first takes to come, as in a cloud that is short of machines."""
    resources: dict[str, int] = field(default_factory=dict)

    def described(self, object_store_bytes: int) -> dict[str, Any]:
        """Return the group as JSON values, for the supervisor."""
        return {"name": self.name, "least": self.least, "most": self.most, "seconds_apart": self.seconds_apart,
                "labels": Group(self.name).node_labels,
                "resources": {"CPU": self.cpus, "memory": NODE_MEMORY, "object_store_memory": object_store_bytes,
                              **self.resources}}


def autoscaler_config(gcs_address: str, temp_dir: str, groups: Sequence[Mapping[str, Any]],
                      idle_seconds: float) -> dict[str, Any]:
    """Return the autoscaler's configuration: the values of a cluster launcher file.

    Args:
        gcs_address: address of the cluster.
        temp_dir: folder of Ray's sessions.
        groups: groups as `AutoscaledGroup.described` returns them.
        idle_seconds: time after which an idle node ends.
    """
    types = {group["name"]: {"resources": dict(group["resources"]), "labels": dict(group["labels"]),
                             "node_config": {"seconds_apart": group["seconds_apart"]}, "min_workers": group["least"],
                             "max_workers": group["most"]} for group in groups}
    types[HEAD_TYPE] = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    return {
        "cluster_name": "tidewheel-local", "max_workers": sum(group["most"] for group in groups),
        "idle_timeout_minutes": idle_seconds / 60, "upscaling_speed": 100.0,
        "provider": {"type": "external", "module": "tidewheel.cluster.fake_cloud.LoopbackNodes",
                     "gcs_address": gcs_address, "temp_dir": temp_dir, "head_node_id": HEAD_ID,
                     "launch_multiple": True, "disable_node_updaters": True, "disable_launch_config_check": True},
        "available_node_types": types, "head_node_type": HEAD_TYPE, "auth": {}, "docker": {},
        "initialization_commands": [], "setup_commands": [], "head_setup_commands": [], "worker_setup_commands": [],
        "head_start_ray_commands": [], "worker_start_ray_commands": [], "file_mounts": {},
        "cluster_synced_files": [], "file_mounts_sync_continuously": False, "rsync_exclude": [], "rsync_filter": []}
