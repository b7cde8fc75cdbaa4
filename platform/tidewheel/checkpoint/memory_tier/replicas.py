"""Placement of replicas: in another failure domain, with the next node as the fallback.

A replica is in another failure domain than its node whenever there is one, so the loss of a rack takes one of the two.
A node without a label is in the failure domain of its host.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tidewheel.checkpoint.memory_tier.protocol import Address, Connection, connect

RETRY_SECONDS = 5.0
"""Time before an agent that failed is asked again."""


def replica_candidates(nodes: Sequence[Address], own_agent: Address,
                       domains: Mapping[Address, str] | None = None) -> tuple[Address, ...]:
    """Return the agents that may hold replicas of `own_agent`, in order of preference.

    Nodes in other failure domains come first, then nodes on other hosts of its own domain, then those on its own host.
    Replicas are distributed evenly: unless one domain has more than half of the nodes, each node is the first choice
    of exactly one other.

    Args:
        nodes: the agents of the run.
        own_agent: the agent whose replicas are placed.
        domains: the failure domain of each node that has a label for it.
    """
    labels = domains or {}

    def domain(node: Address) -> tuple[str, str]:
        return ("label", labels[node]) if labels.get(node) else ("host", node.host)

    everyone = {*nodes, own_agent}
    sizes = Counter(domain(node) for node in everyone)
    ordered = sorted(everyone, key=lambda node: (-sizes[domain(node)], domain(node), node))  # grouped by domain
    position, largest = ordered.index(own_agent), sizes[domain(ordered[0])]
    if 2 * largest <= len(ordered):
        start = position + largest  # past the end of its own domain, as no domain is larger
    elif position < largest:
        start = largest + position % (len(ordered) - largest) if largest < len(ordered) else position + 1
    else:
        start = position - largest  # nodes outside the largest domain use nodes inside it
    rotated = [ordered[(start + offset) % len(ordered)] for offset in range(len(ordered))]
    other_nodes = [node for node in rotated if node != own_agent]
    return tuple(sorted(other_nodes, key=lambda node: (domain(node) == domain(own_agent), node.host == own_agent.host)))


class ReplicaSender:
    """Sends replicas to the first candidate that accepts them and stays with it. Not safe for concurrent use.

    Args:
        candidates: agents in order of preference, see `replica_candidates`; empty: no replicas.
        token: the run's secret.
    """

    def __init__(self, candidates: Sequence[Address], token: str) -> None:
        self._candidates, self._token = list(candidates), token
        self._connection: Connection | None = None  # to the first candidate
        self._retry_at: dict[Address, float] = {}
        self._holders: set[Address] = set()

    def send(self, message: dict[str, Any], *payloads: Any) -> tuple[str, str]:
        """Send to the first candidate that accepts.

        Args:
            message: the request.
            payloads: the bytes that follow it, see `Connection.send`.

        Returns:
            "host:port" of the agent that accepted, or "" if none did; and why the agents asked before it failed.
        """
        problems: list[str] = []
        for address in tuple(self._candidates):
            if time.monotonic() < self._retry_at.get(address, 0.0):
                continue
            problem = self._ask(address, message, *payloads)
            if not problem:
                self._holders.add(address)
                return f"{address.host}:{address.port}", "; ".join(problems)
            problems.append(problem)
            self._candidates.remove(address)
            self._candidates.append(address)  # asked again after all others
        return "", "; ".join(problems)

    def tell_all(self, message: dict[str, Any]) -> None:
        """Send to every agent that holds a replica and answers."""
        for address in self._candidates:
            if address in self._holders and time.monotonic() >= self._retry_at.get(address, 0.0):
                self.close()  # the open connection is to the first candidate
                self._ask(address, message)
        self.close()

    def close(self) -> None:
        """Hang up; the next `send` connects again."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _ask(self, address: Address, message: dict[str, Any], *payloads: Any) -> str:
        """Send one request; return why it failed, or ""."""
        try:
            if self._connection is None:
                self._connection = connect(address, self._token)
            self._connection.ask(message, *payloads)
        except OSError as error:
            self.close()
            self._retry_at[address] = time.monotonic() + RETRY_SECONDS
            return f"{address.host}:{address.port}: {error}"
        return ""
