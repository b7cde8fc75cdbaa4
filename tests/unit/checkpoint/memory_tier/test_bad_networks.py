"""Bad networks between the agents of the memory tier, and between an agent and a reader."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from tests.unit.checkpoint.helpers import Events, equal, state
from tests.unit.elastic.network import Network, network
from tidewheel.checkpoint.memory_tier import part_reader, protocol, replicas
from tidewheel.checkpoint.memory_tier.agent import Agent
from tidewheel.checkpoint.memory_tier.client import MemoryTier
from tidewheel.checkpoint.memory_tier.inventory import Recoverable
from tidewheel.checkpoint.memory_tier.protocol import Address, connect
from tidewheel.checkpoint.memory_tier.restore import inventory, load, newest_complete

TOKEN = "secret"
SHORT = 0.5


class Nodes:
    """Three agents. Others reach the second one through a network."""

    def __init__(self, agents: list[Agent], link: Network) -> None:
        self.agents = agents
        self.link = link
        self.far = Address(*link.address)
        self.events = Events()
        self.worker = MemoryTier({0: agents[0].address}, agents[0].address, (self.far, agents[2].address), 0, 1, TOKEN,
                                 on_event=self.events)

    def keep(self, step: int) -> bool:
        """Keep a state; return whether it is on two nodes."""
        self.worker.snapshot(step, state(step), {"step": step})
        return self.worker.flush()

    def newest(self, *agents: Address) -> Recoverable:
        found = newest_complete(inventory(agents, TOKEN))
        assert found is not None
        return found


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    agents = [Agent("127.0.0.1", TOKEN, "networks") for _ in range(3)]
    with network(agents[1].address) as link:
        running = Nodes(agents, link)
        yield running
        running.worker.close()
    for agent in agents:
        agent.stop()


def test_a_replica_is_sent_and_read_over_a_delayed_and_slow_link(nodes: Nodes) -> None:
    nodes.link.up.delay = nodes.link.down.delay = 0.1
    nodes.link.up.loss = nodes.link.down.loss = 0.05
    nodes.link.down.bytes_per_second = 100_000
    assert nodes.keep(1)
    nodes.agents[0].stop()
    filled = state(99)
    assert load(nodes.newest(nodes.far), filled) == {"step": 1}
    assert equal(filled, state(1))
    assert not nodes.events


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_replica_goes_elsewhere_if_its_agent_is_cut_off_in_one_direction(nodes: Nodes, way: str,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "connect", functools.partial(connect, seconds=SHORT, idle_seconds=SHORT))
    assert nodes.keep(1)
    getattr(nodes.link, way).held = True
    assert nodes.keep(2)
    third = nodes.agents[2].address
    assert [part.content.step for part in nodes.agents[2].store.parts() if part.origin == "copy"] == [2]
    assert nodes.worker.working
    [(kind, detail)] = nodes.events
    assert (kind, detail["copies_to"]) == ("replica_lost", f"{third.host}:{third.port}")


def test_a_reader_that_no_longer_hears_an_agent_reads_the_other_copy(nodes: Nodes,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_reader, "READ_SECONDS", SHORT)
    monkeypatch.setattr(part_reader, "ASK_SECONDS", SHORT)
    monkeypatch.setattr(protocol, "HELLO_SECONDS", 600.0)  # a reader does not wait for as long as an agent does
    assert nodes.keep(1)
    found = nodes.newest(nodes.far, nodes.agents[0].address)
    first = found.copies[0][0]
    assert first.origin == "own"
    nodes.link.down.held = True
    copies = tuple(reversed(found.copies[0]))
    assert copies[0].agent == nodes.far
    filled = state(99)
    assert load(Recoverable(found.step, found.generation, 1, (copies,), TOKEN), filled) == {"step": 1}
    assert equal(filled, state(1))
    assert inventory([nodes.far], TOKEN, seconds=SHORT).alive == ()
