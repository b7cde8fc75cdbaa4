"""The nodes of the connected Ray cluster at present, from the table of Ray's control store (GCS)."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tidewheel.autoscaler import cluster_status
from tidewheel.placement import Selector, is_spot, matches

NAMESPACE = "tidewheel"
"""Namespace of the actors that are found by name."""
PROBE_SECONDS = 1.0
ANY: Selector = MappingProxyType({})
"""The selector that every node matches."""


@dataclass(frozen=True)
class Node:
    """One node of the cluster."""

    node_id: str
    """Ray's id, in hexadecimal digits."""
    host: str
    """Address of its raylet."""
    port: int
    """Port of its raylet."""
    resources: Mapping[str, float] = field(compare=False)
    """Resources that it offers, by Ray's names."""
    draining: bool = False
    """It is about to leave."""
    labels: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def spot(self) -> bool:
        """Whether it may be taken away at any time."""
        return is_spot(self.labels)

    def answers(self) -> bool:
        """Return whether the raylet accepts a connection. A killed one refuses long before Ray considers it dead."""
        try:
            socket.create_connection((self.host, self.port), timeout=PROBE_SECONDS).close()
        except OSError:
            return False
        return True


def alive(selector: Selector = ANY) -> list[Node]:
    """Return the nodes that match `selector` and that Ray considers alive, including nodes that are being drained."""
    import ray
    from ray._private import state

    draining = state.state.get_draining_nodes() or {}
    nodes = [_node(row, row["NodeID"] in draining) for row in ray.nodes() if row["Alive"]]
    return [node for node in nodes if matches(selector, node.labels)]


def usable(selector: Selector = ANY, wait_seconds: float = 0.0) -> list[Node]:
    """Return the nodes that match, are alive, respond, and are not being drained.

    Args:
        selector: labels of the nodes.
        wait_seconds: wait up to this long until every node that Ray considers alive responds, so that Ray does not
            place workers on a dead node.
    """
    until = time.monotonic() + wait_seconds
    while True:
        nodes = [node for node in alive(selector) if not node.draining]
        if not nodes:
            return []
        with ThreadPoolExecutor(min(64, len(nodes))) as pool:
            answering = list(pool.map(Node.answers, nodes))
        if all(answering) or time.monotonic() >= until:
            return [node for node, answers in zip(nodes, answering, strict=True) if answers]
        time.sleep(0.1)


def free() -> dict[str, Mapping[str, float]]:
    """Return the resources of each node that nothing holds, by Ray's names, by node id.

    They may be a second old. The result is empty while Ray's control store does not answer.
    """
    from ray.exceptions import RpcError

    try:
        states = cluster_status().cluster_resource_state.node_states
    except RpcError:
        return {}
    return {state.node_id.hex(): dict(state.available_resources) for state in states}


def _node(row: dict[str, Any], draining: bool) -> Node:
    return Node(row["NodeID"], row["NodeManagerAddress"], int(row["NodeManagerPort"]), row.get("Resources") or {},
                draining, row.get("Labels") or {})
