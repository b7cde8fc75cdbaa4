"""Watch the cluster's nodes: Ray's table of them, and what has changed since the last look."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tidewheel.elastic.layout import slots
from tidewheel.elastic.nodes import Node
from tidewheel.placement import failure_domain
from tidewheel.train.elastic_config import ElasticConfig


@dataclass(frozen=True)
class NodeChanges:
    """What a look at the nodes has found."""

    draining: tuple[str, ...]
    """Nodes that are about to leave."""
    lost: Mapping[str, str]
    """Hosts of the nodes that are gone since the last look, by node."""
    domains: Mapping[str, str]
    """Failure domain of each node whose labels name one."""


class NodeWatch:
    """Looks at the nodes, and records events about them.

    Args:
        elastic: which nodes count, and what a worker needs.
        event: records an event.
    """

    def __init__(self, elastic: ElasticConfig, event: Callable[[str, dict[str, Any]], None]) -> None:
        self.hosts: dict[str, str] = {}
        """Host by node, also of nodes that are gone."""
        self.slots: dict[str, int] = {}
        """Room for workers on the nodes that are there and stay."""
        self._elastic = elastic
        self._event = event
        self._known: dict[str, Node] | None = None

    def look(self) -> NodeChanges:
        """Return what has changed since the last call."""
        from tidewheel.elastic import nodes

        now = {node.node_id: node for node in nodes.alive(self._elastic.placement.selector)}
        known = self._known if self._known is not None else now
        self.hosts.update({node_id: node.host for node_id, node in now.items()})
        self.slots = {node_id: slots([node.resources], self._elastic.needs) for node_id, node in now.items()
                      if not node.draining}
        self._record(known, now)
        self._known = now
        domains = {node_id: failure_domain(node.labels) for node_id, node in now.items()}
        return NodeChanges(tuple(node_id for node_id, node in now.items() if node.draining),
                           {node_id: known[node_id].host for node_id in known.keys() - now.keys()},
                           {node_id: domain for node_id, domain in domains.items() if domain})

    def _record(self, known: dict[str, Node], now: dict[str, Node]) -> None:
        for node_id in known.keys() - now.keys():
            self._event("node_lost", {"node": node_id, "host": known[node_id].host})
        for node_id in now.keys() - known.keys():
            self._event("node_joined", {"node": node_id, "host": now[node_id].host,
                                        "cpus": now[node_id].resources.get("CPU", 0.0)})
        for node_id in now.keys() & known.keys():
            if now[node_id].draining and not known[node_id].draining:
                self._event("node_draining", {"node": node_id, "host": now[node_id].host})
