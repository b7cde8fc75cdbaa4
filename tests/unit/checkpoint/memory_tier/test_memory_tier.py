"""Workers and agents of one process and of several: what is kept, where, and what is left after each loss."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.checkpoint.helpers import Events, clear, equal, state
from tidewheel.checkpoint.memory_tier import room
from tidewheel.checkpoint.memory_tier.agent import Agent
from tidewheel.checkpoint.memory_tier.client import BACKGROUND_BYTES, MemoryTier
from tidewheel.checkpoint.memory_tier.protocol import Address, connect
from tidewheel.checkpoint.memory_tier.replicas import replica_candidates
from tidewheel.checkpoint.memory_tier.restore import inventory, load, newest_complete
from tidewheel.checkpoint.memory_tier.slots import HEADER_BYTES
from tidewheel.errors import CheckpointError

TOKEN = "secret"


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    """Two, as of two nodes."""
    results = [Agent("127.0.0.1", TOKEN, "test") for _ in range(2)]
    yield results
    for agent in results:
        agent.stop()


@pytest.fixture(scope="module")
def one_agent() -> Iterator[Agent]:
    agent = Agent("127.0.0.1", TOKEN, "one")
    yield agent
    agent.stop()


def tier(agents: list[Agent], rank: int = 0, world_size: int = 1, **options) -> MemoryTier:
    own_agent = agents[rank]
    candidates = replica_candidates([agent.address for agent in agents], own_agent.address)
    return MemoryTier(dict(enumerate(agent.address for agent in agents)), own_agent.address, candidates, rank,
                      world_size, TOKEN, **options)


def newest(*agents: Agent):
    return newest_complete(inventory([agent.address for agent in agents], TOKEN))


def test_a_state_is_restored_from_its_own_node_and_from_the_replica(agents):
    worker, values = tier(agents), state(1)
    for step in range(1, 6):
        values = state(step)
        worker.snapshot(step, values, {"step": step, "position": 10 * step})
        clear(values)  # training goes on at once
    assert worker.flush()
    assert worker.last["step"] == 5
    for own_agent in (agents[0].address, None):  # by memory map, and over the wire
        found, filled = newest(*agents), state(99)
        assert (found.step, found.world_size) == (5, 1)
        assert load(found, filled, own_agent=own_agent) == {"step": 5, "position": 50}
        assert equal(filled, state(5))
    worker.close()
    agents[0].stop()
    assert not agents[0].store.folder.exists()
    found, filled = newest(*agents), state(99)
    assert [copy.origin for copy in found.copies[0]] == ["copy"]
    assert load(found, filled)["step"] == 5
    assert equal(filled, state(5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_state_on_the_gpu(agents):
    def moved(values):
        return {group: {name: tensor.cuda() for name, tensor in tensors.items()} for group, tensors in values.items()}

    worker = tier(agents)
    for step in (1, 2, 3, 4):
        values = moved(state(step))
        worker.snapshot(step, values, {"step": step})
        clear(values)
    assert worker.flush()
    filled = moved(state(99))
    assert load(newest(*agents), filled, own_agent=agents[0].address) == {"step": 4}
    assert equal(filled, moved(state(4)))
    worker.close()


def test_unauthenticated_connections_are_refused(agents):
    for token in ("", "wrong"):
        with pytest.raises(ConnectionError):
            connect(agents[0].address, token)
    assert inventory([agents[0].address], "wrong").alive == ()
    with pytest.raises(ConnectionRefusedError):
        connect(Address("127.0.0.1", 1), TOKEN)


def flip(agent: Agent, origin: str, at: int) -> None:
    """Damage a byte of the newest part; counted from the end when negative."""
    part = max((part for part in agent.store.parts() if part.origin == origin), key=lambda part: part.content.step)
    at = at if at >= 0 else part.content.end + at
    part.slot.bytes[at] ^= 0xFF


@pytest.mark.parametrize("at", [0, 8, 24, HEADER_BYTES, HEADER_BYTES + 700, -40, -1], ids=str)
def test_a_damaged_part_is_found_and_the_copy_is_taken(agents, at):
    """In the header, the table, a tensor, `extra`."""
    worker = tier(agents)
    worker.snapshot(1, state(1), {"step": 1})
    worker.flush()
    flip(agents[0], "own", at)
    filled = state(99)
    assert load(newest(*agents), filled, own_agent=agents[0].address) == {"step": 1}
    assert equal(filled, state(1))
    flip(agents[1], "copy", at)
    newest_checkpoint = newest(*agents)
    if newest_checkpoint is not None:  # a header that is damaged is no part any more
        with pytest.raises(CheckpointError, match=r"the part of rank 0 is lost .*damaged.*damaged"):
            load(newest_checkpoint, state(99), own_agent=agents[0].address)
    worker.close()


def test_a_state_that_does_not_fit(agents):
    worker = tier(agents)
    worker.snapshot(1, state(1), {})
    worker.flush()
    more, other = state(1), state(1)
    more["model"]["more"] = torch.zeros(1)
    other["model"]["wide"] = torch.zeros(2, 2)
    for wrong, match in ((more, "more is not in the snapshot"), (other, "wide is float32")):
        with pytest.raises(CheckpointError, match=match):
            load(newest(*agents), wrong)
    worker.close()


def test_the_shape_may_change_and_extra_may_grow(agents):
    worker = tier(agents)
    worker.snapshot(1, state(1), {})
    grown = state(2)
    grown["model"]["more"] = torch.ones(1000, 1000)
    worker.snapshot(2, grown, {"text": "x" * 3_000_000})
    assert worker.flush()
    filled = {"model": {"more": torch.zeros(1000, 1000)}, "optimizer": {}}
    assert len(load(newest(*agents), filled)["text"]) == 3_000_000
    assert filled["model"]["more"].sum() == 1e6
    worker.close()


def test_a_large_state_is_copied_behind_the_training_until_it_settles(agents):
    worker, values = tier(agents), {"model": {"weight": torch.ones(BACKGROUND_BYTES)}, "optimizer": {}}
    for step in (1, 2, 3, 4):
        worker.snapshot(step, values, {"step": step})
        worker.settle()
        values["model"]["weight"] += 1
    assert worker.flush()
    assert worker.last["stall_seconds"] > 0
    filled = {"model": {"weight": torch.zeros(BACKGROUND_BYTES)}, "optimizer": {}}
    assert load(newest(*agents), filled) == {"step": 4}
    assert filled["model"]["weight"].unique().tolist() == [4]
    worker.snapshot(5, values, {"step": 5})
    worker.close()  # what was being copied is whole, and the agent takes it in
    until = time.monotonic() + 60
    while newest(agents[0]).step != 5:
        assert time.monotonic() < until


def test_a_tier_that_is_given_up_during_the_copy_says_so_once(agents):
    events = Events()
    worker, values = tier(agents, on_event=events), {"model": {"weight": torch.ones(BACKGROUND_BYTES)}, "optimizer": {}}
    worker.snapshot(1, values, {})
    worker.flush()
    worker.break_off()
    worker.snapshot(2, values, {})
    worker.settle()
    worker.snapshot(3, values, {})
    worker.settle()
    assert not worker.working
    assert [kind for kind, _ in events] == ["memory_tier_lost"]


def test_a_roll_back_forgets(agents):
    worker = tier(agents)
    for step in (1, 2, 3):
        worker.snapshot(step, state(step), {})
    worker.forget()
    assert newest(*agents) is None
    worker.snapshot(2, state(20), {"again": True})
    assert worker.flush()
    found, filled = newest(*agents), state(99)
    assert (found.step, load(found, filled)) == (2, {"again": True})
    assert equal(filled, state(20))
    worker.close()


def test_an_older_generation_goes_once_the_next_is_whole_everywhere(agents):
    old = tier(agents, generation=0)
    for step in (1, 2):
        old.snapshot(step, state(step), {})
    old.flush()
    old.close()
    new = tier(agents, generation=1)
    held = []
    for step in (2, 3, 4):
        new.snapshot(step, state(step), {})
        new.flush()
        held.append({copy.generation for copy in inventory([a.address for a in agents], TOKEN).copies})
    assert held == [{0, 1}, {0, 1}, {1}]
    assert len(list(agents[0].store.folder.glob("slot-*"))) <= 3 + 3
    new.close()


def test_without_an_agent_or_room_the_training_goes_on(agents, monkeypatch):
    events = Events()
    worker = tier(agents, on_event=events)
    worker.snapshot(1, state(1), {})
    agents[1].stop()  # the holder of the replicas
    for step in (2, 3, 4):
        worker.snapshot(step, state(step), {})
    assert not worker.flush()
    assert worker.working
    assert newest(agents[0]).step == 4
    agents[0].stop()
    for step in (5, 6):
        worker.snapshot(step, state(step), {})
    assert not worker.working
    assert [kind for kind, _ in events] == ["replica_lost", "memory_tier_lost"]
    assert all(TOKEN not in str(detail) for _, detail in events)

    monkeypatch.setattr(room, "free_bytes", lambda folder: 1000)
    full, events = Agent("127.0.0.1", TOKEN, "test"), Events()
    worker = tier([full], on_event=events)
    worker.prepare(state(1))
    worker.snapshot(1, state(1), {})
    [lost] = events.of("memory_tier_lost")
    assert "shared memory are needed for the memory tier, 0.00 GB are free" in lost["reason"]
    full.stop()


def test_an_agent_that_is_told_to_stop_has_deleted_everything_when_it_hangs_up(agents):
    worker = tier(agents)
    worker.snapshot(1, state(1), {})
    worker.flush()
    connection = connect(agents[0].address, TOKEN)
    connection.ask({"op": "stop"})
    with pytest.raises(ConnectionError, match="closed"):
        connection.receive()
    assert not agents[0].store.folder.exists()
    worker.close()


def test_an_agent_that_nobody_needs_ends():
    ended = threading.Event()
    agent = Agent("127.0.0.1", TOKEN, "test", linger_seconds=0.3, on_stop=ended.set)
    worker = tier([agent])
    worker.snapshot(1, state(1), {})
    assert not ended.wait(1)  # a worker is there
    worker.close()
    assert ended.wait(60)
    assert not agent.store.folder.exists()


@given(st.binary(max_size=200))
@settings(max_examples=8)
def test_nonsense_ends_its_connection_and_nothing_else(one_agent, data):
    agent = one_agent
    with socket.create_connection(agent.address, timeout=60) as unauthenticated:
        unauthenticated.sendall(data)
    connection = connect(agent.address, TOKEN)
    connection._socket.sendall(data)
    connection.close()
    connection = connect(agent.address, TOKEN)
    for message in ({"op": "fly"}, {}, {"op": "read", "part": 1}, {"op": "put", "slot": 9}):
        with pytest.raises(ConnectionError, match="Error"):
            connection.ask(message)
    assert connection.ask({"op": "inventory"}) == {"parts": [], "workers": 0, "generation": -1, "uploads": False}
    connection.close()


def test_the_next_node_takes_the_replicas_when_their_holder_is_lost():
    agents, events = [Agent(f"127.0.0.{host}", TOKEN, "test") for host in (1, 2, 3)], Events()
    worker = tier(agents, on_event=events)
    for step in (1, 2):
        worker.snapshot(step, state(step), {"step": step})
    worker.flush()
    agents[1].stop()
    for step in (3, 4):
        worker.snapshot(step, state(step), {"step": step})
        assert worker.flush()
    [lost] = events.of("replica_lost")
    assert lost["copies_to"] == f"127.0.0.3:{agents[2].address.port}"
    worker.close()
    agents[0].stop()  # and then this node
    filled = state(99)
    assert load(newest(agents[2]), filled) == {"step": 4}
    assert equal(filled, state(4))
    agents[2].stop()
