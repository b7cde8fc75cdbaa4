"""Where the copies of a worker's states go: to its buddy, or, when that is gone, to the next node of the ring.

A buddy shares no failure domain with its node whenever there is another one: what takes a rack away takes one of the
two copies. Nodes without a label are domains of their own, by host.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tidewheel.checkpoint.memory_tier.protocol import Address, Connection, connect

RETRY_SECONDS = 5.0
"""An agent that did not answer is left alone for so long."""


def ring(nodes: Sequence[Address], mine: Address, domains: Mapping[Address, str] | None = None) -> tuple[Address, ...]:
    """Return who may hold the copies of `mine`, its buddy first: nodes in other failure domains before those on other
    hosts of its own, and these before those on its own host.

    Copies are spread evenly: while no domain has more than half of the nodes, each node is the buddy of exactly one.

    Args:
        domains: the failure domain of each node that has a label for it.
    """
    known = domains or {}

    def domain(node: Address) -> tuple[str, str]:
        return ("label", known[node]) if known.get(node) else ("host", node.host)

    everyone = {*nodes, mine}
    sizes = Counter(domain(node) for node in everyone)
    ordered = sorted(everyone, key=lambda node: (-sizes[domain(node)], domain(node), node))  # domain by domain
    at, largest = ordered.index(mine), sizes[domain(ordered[0])]
    if 2 * largest <= len(ordered):
        start = at + largest  # past the end of its own domain, as none is larger
    elif at < largest:
        start = largest + at % (len(ordered) - largest) if largest < len(ordered) else at + 1
    else:
        start = at - largest  # what is not in the largest domain has its buddy there
    turned = [ordered[(start + step) % len(ordered)] for step in range(len(ordered))]
    others = [node for node in turned if node != mine]
    return tuple(sorted(others, key=lambda node: (domain(node) == domain(mine), node.host == mine.host)))


class Buddies:
    """Sends copies to the first agent of a ring that takes them, and stays with it. Not for two threads at once.

    Args:
        candidates: in the order in which they are tried, see `ring`; empty: there are no copies.
        token: the run's secret.
    """

    def __init__(self, candidates: Sequence[Address], token: str) -> None:
        self._candidates, self._token = list(candidates), token
        self._connection: Connection | None = None
        self._not_before: dict[Address, float] = {}
        self._used: set[Address] = set()

    def send(self, message: dict[str, Any], *payloads: Any) -> tuple[str, str]:
        """Send to whoever takes it: ("host:port" of who did, "": nobody; why others, asked just now, did not)."""
        refused: list[str] = []
        for address in tuple(self._candidates):
            if time.monotonic() < self._not_before.get(address, 0.0):
                continue
            problem = self._ask(address, message, *payloads)
            if not problem:
                self._used.add(address)
                return f"{address.host}:{address.port}", "; ".join(refused)
            refused.append(problem)
            self._candidates.remove(address)
            self._candidates.append(address)  # its turn comes when all others have failed
        return "", "; ".join(refused)

    def tell_all(self, message: dict[str, Any]) -> None:
        """Send to everybody who holds a copy and answers."""
        for address in self._candidates:
            if address in self._used and time.monotonic() >= self._not_before.get(address, 0.0):
                self.close()  # the connection is another's, but for the first
                self._ask(address, message)
        self.close()

    def close(self) -> None:
        """Hang up; the next `send` connects anew."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _ask(self, address: Address, message: dict[str, Any], *payloads: Any) -> str:
        """Why it failed; "" when it did not. The connection is that of the first candidate."""
        try:
            if self._connection is None:
                self._connection = connect(address, self._token)
            self._connection.ask(message, *payloads)
        except OSError as error:
            self.close()
            self._not_before[address] = time.monotonic() + RETRY_SECONDS
            return f"{address.host}:{address.port}: {error}"
        return ""
