"""The nodes of the connected Ray cluster as they are now, from the GCS table: alive, and not about to leave."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

NAMESPACE = "tidewheel"
"""Of the actors that are found by name."""
PROBE_SECONDS = 1.0


@dataclass(frozen=True)
class Node:
    """One node: Ray's id (hex), address and port of its raylet, what it offers, and whether it is being drained."""

    node_id: str
    host: str
    port: int
    cpus: float
    gpus: float
    draining: bool = False

    def answers(self) -> bool:
        """Whether the raylet takes a connection. A killed one refuses at once, long before Ray calls it dead."""
        try:
            socket.create_connection((self.host, self.port), timeout=PROBE_SECONDS).close()
        except OSError:
            return False
        return True


def alive() -> list[Node]:
    """Nodes that Ray holds to be alive, with their drains."""
    import ray
    from ray._private import state

    draining = state.state.get_draining_nodes() or {}
    return [_node(row, row["NodeID"] in draining) for row in ray.nodes() if row["Alive"]]


def usable(patience_seconds: float = 0.0) -> list[Node]:
    """Nodes that are alive, stay, and answer.

    Args:
        patience_seconds: wait up to this long until every node that Ray holds to be alive answers too, so that Ray
            does not place workers on one it has not yet found dead.
    """
    until = time.monotonic() + patience_seconds
    while True:
        nodes = [node for node in alive() if not node.draining]
        if not nodes:
            return []
        with ThreadPoolExecutor(min(64, len(nodes))) as pool:
            answering = list(pool.map(Node.answers, nodes))
        if all(answering) or time.monotonic() >= until:
            return [node for node, answers in zip(nodes, answering, strict=True) if answers]
        time.sleep(0.1)


def can_grow() -> bool:
    """Whether an autoscaler runs that may add nodes when workers are asked for."""
    from ray._private import state

    return bool(state.state.get_max_resources_from_cluster_config())


def free() -> list[tuple[float, float]]:
    """(CPUs, GPUs) that nobody has taken, per node that is alive."""
    from ray._private import state

    return [(row.get("CPU", 0.0), row.get("GPU", 0.0)) for row in state.available_resources_per_node().values()]


def _node(row: dict[str, Any], draining: bool) -> Node:
    resources = row.get("Resources", {})
    return Node(row["NodeID"], row["NodeManagerAddress"], int(row["NodeManagerPort"]),
                resources.get("CPU", 0.0), resources.get("GPU", 0.0), draining)
