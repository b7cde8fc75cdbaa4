"""A coordinator whose workers connect through the relays of their nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tests.agent_addresses import AgentAddresses
from tests.benchmarks.control_plane_cpu import measure
from tidewheel.elastic.agent_supervisor import AgentSupervisor
from tidewheel.elastic.agents import CurrentRelay
from tidewheel.elastic.client import Client
from tidewheel.elastic.connection import Endpoint
from tidewheel.elastic.coordinator import Coordinator
from tidewheel.elastic.messages import Abort, ExitReason, Hello, Left
from tidewheel.elastic.node_relay import NodeRelay
from tidewheel.ownership import acquire
from tidewheel.storage import store
from tidewheel.train.elastic_config import ElasticConfig


class AgentsWithRelays(AgentAddresses):
    """Agents that are addresses, with relays that are real."""

    def __init__(self) -> None:
        self._current: dict[str, CurrentRelay] = {}
        self.asked: list[str] = []
        """Nodes of which a relay was asked for."""

    def relays(self, nodes: Iterable[str], endpoint: Endpoint, seconds: float) -> dict[str, tuple[str, int]]:
        self.asked += nodes
        return {node: self._current.setdefault(node, CurrentRelay("127.0.0.1", node)).to(endpoint) for node in nodes}

    def relay_of(self, node: str) -> NodeRelay:
        relay = self._current[node]._relay
        assert relay is not None
        return relay


def relayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Coordinator, AgentsWithRelays]:
    monkeypatch.setattr(Coordinator, "_watch", lambda self: None)
    config = ElasticConfig(max_workers=4, relay_workers=4)
    coordinator = Coordinator(str(tmp_path), config, (1, 2, 3, 4), epoch=acquire(store(tmp_path)).epoch)
    agents = AgentsWithRelays()
    coordinator._agents.supervisor = AgentSupervisor(agents)
    coordinator.start("127.0.0.1")
    return coordinator, agents


def test_a_death_and_the_loss_of_a_relay_in_a_run_with_relays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, agents = relayed(tmp_path, monkeypatch)
    nodes = {"a": "m", "b": "m", "c": "n", "d": "n"}
    coordinator.expect(nodes, True)
    endpoint = coordinator.endpoint()
    end = time.monotonic() + 120
    while not all(coordinator.relay(node) for node in "mn"):
        assert time.monotonic() < end
        time.sleep(0.01)
    received: dict[str, SimpleQueue[Any]] = {name: SimpleQueue() for name in nodes}
    clients = {name: Client(endpoint.address, Hello(name, node, endpoint.token), received[name].put, print,
                            relay=coordinator.relay(node)) for name, node in nodes.items()}
    assert {received[name].get(timeout=60).rank for name in nodes} == {0, 1, 2, 3}
    clients["b"].close()
    for name in "acd":
        assert received[name].get(timeout=60) == Abort(0)
        clients[name].send(Left(0, ExitReason.FAILED, "RuntimeError: connection closed by peer"))
    again = {name: received[name].get(timeout=60) for name in "acd"}
    assert {(order.rank, order.world_size) for order in again.values()} == {(0, 3), (1, 3), (2, 3)}
    ended = coordinator.relay("n")
    agents.relay_of("n").stop()  # c and d return directly, and keep their ranks
    clients["a"].close()
    for name in "cd":
        assert received[name].get(timeout=60) == Abort(1)
        clients[name].send(Left(1, ExitReason.FAILED, "RuntimeError: connection closed by peer"))
    assert [received[name].get(timeout=60).world_size for name in "cd"] == [2, 2]
    assert coordinator.relay("n") == ended
    coordinator.expect({"e": "n"})  # asks the agent of its node for a relay again
    while coordinator.relay("n") in (None, ended):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert sorted(agents.asked) == ["m", "n", "n"]
    received["e"] = SimpleQueue()
    clients["e"] = Client(endpoint.address, Hello("e", "n", endpoint.token), received["e"].put, print,
                          relay=coordinator.relay("n"))
    while not clients["e"].welcomed:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert agents.relay_of("n")._workers
    for client in clients.values():
        client.close()
    for node in "mn":
        agents.relay_of(node).stop()
    coordinator.end()


def test_orders_and_reports_of_a_node_are_one_line_each() -> None:
    """It checks lines and ranks, and how the time grows is in the benchmark."""
    row = asyncio.run(measure(64))
    assert row["workers"] == "64"


def test_a_run_of_few_workers_has_no_relays() -> None:
    assert not ElasticConfig(max_workers=511).relayed
    assert ElasticConfig(max_workers=512).relayed
    assert not ElasticConfig(max_workers=16_384, relay_workers=0).relayed
