"""Memory agents that are addresses only, for tests of what workers are told about them."""

from __future__ import annotations

from collections.abc import Iterable

from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.elastic.connection import Endpoint


class AgentAddresses:
    """Takes the place of `elastic.agents.Agents`: each node has an agent at the host of its name."""

    token = "secret"

    def on(self, nodes: Iterable[str], seconds: float) -> dict[str, Address]:
        """Return an address for each node."""
        return {node: Address(node, 1) for node in nodes}

    def known(self) -> dict[str, Address]:
        """Return nothing: no former driver has left agents."""
        return {}

    def relays(self, nodes: Iterable[str], endpoint: Endpoint, seconds: float) -> dict[str, tuple[str, int]]:
        """Return no relay: the workers of a node connect directly."""
        return {}

    def lost(self, node: str) -> None:
        """Do nothing: there is no process."""

    def stop(self) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing."""
