"""The nodes of the connected Ray cluster as they are now, from the GCS table: alive, and not about to leave."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tidewheel.placement import Selector, is_spot, matches

NAMESPACE = "tidewheel"
"""Of the actors that are found by name."""
PROBE_SECONDS = 1.0
ANY: Selector = MappingProxyType({})
"""The selector that every node matches."""


@dataclass(frozen=True)
class Node:
    """One node: Ray's id (hex), address and port of its raylet, the resources it offers by Ray's names, whether it is
    being drained, and its labels."""

    node_id: str
    host: str
    port: int
    resources: Mapping[str, float] = field(compare=False)
    draining: bool = False
    labels: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def spot(self) -> bool:
        """It may be taken away at any time."""
        return is_spot(self.labels)

    def answers(self) -> bool:
        """Whether the raylet takes a connection. A killed one refuses at once, long before Ray calls it dead."""
        try:
            socket.create_connection((self.host, self.port), timeout=PROBE_SECONDS).close()
        except OSError:
            return False
        return True


def alive(selector: Selector = ANY) -> list[Node]:
    """Nodes that match `selector` and that Ray holds to be alive, with their drains."""
    import ray
    from ray._private import state

    draining = state.state.get_draining_nodes() or {}
    found = [_node(row, row["NodeID"] in draining) for row in ray.nodes() if row["Alive"]]
    return [node for node in found if matches(selector, node.labels)]


def usable(selector: Selector = ANY, patience_seconds: float = 0.0) -> list[Node]:
    """Nodes that match, are alive, stay, and answer.

    Args:
        selector: of the nodes that are meant.
        patience_seconds: wait up to this long until every node that Ray holds to be alive answers too, so that Ray
            does not place workers on one it has not yet found dead.
    """
    until = time.monotonic() + patience_seconds
    while True:
        nodes = [node for node in alive(selector) if not node.draining]
        if not nodes:
            return []
        with ThreadPoolExecutor(min(64, len(nodes))) as pool:
            answering = list(pool.map(Node.answers, nodes))
        if all(answering) or time.monotonic() >= until:
            return [node for node, answers in zip(nodes, answering, strict=True) if answers]
        time.sleep(0.1)


def _node(row: dict[str, Any], draining: bool) -> Node:
    return Node(row["NodeID"], row["NodeManagerAddress"], int(row["NodeManagerPort"]), row.get("Resources") or {},
                draining, row.get("Labels") or {})
