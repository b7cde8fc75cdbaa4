"""Workers and agents of one process and of several: what is kept, where, and what is left after each loss."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.checkpoint.helpers import clear, equal, state
from tidewheel.checkpoint.memory.agent import Agent
from tidewheel.checkpoint.memory.client import MemoryTier
from tidewheel.checkpoint.memory.protocol import Address, buddies, connect
from tidewheel.checkpoint.memory.restore import inventory, load, newest_complete

pytestmark = pytest.mark.timeout(60)
TOKEN = "secret"


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    """Two, as of two nodes."""
    found = [Agent("127.0.0.1", TOKEN, "test") for _ in range(2)]
    yield found
    for agent in found:
        agent.stop()


def tier(agents: list[Agent], rank: int = 0, world_size: int = 1, **options) -> MemoryTier:
    mine = agents[rank]
    buddy = buddies([agent.address for agent in agents])[mine.address]
    return MemoryTier(dict(enumerate(agent.address for agent in agents)), mine.address, buddy, rank, world_size, TOKEN,
                      **options)


def newest(*agents: Agent):
    return newest_complete(inventory([agent.address for agent in agents], TOKEN))


def test_a_state_comes_back_from_its_own_node_and_from_the_buddy(agents):
    worker, values = tier(agents), state(1)
    for step in range(1, 6):
        values = state(step)
        worker.snapshot(step, values, {"step": step, "position": 10 * step})
        clear(values)  # training goes on at once
    assert worker.flush()
    assert worker.last["step"] == 5
    for mine in (agents[0].address, None):  # by memory map, and over the wire
        found, filled = newest(*agents), state(99)
        assert (found.step, found.world_size) == (5, 1)
        assert load(found, filled, mine=mine) == {"step": 5, "position": 50}
        assert equal(filled, state(5))
    worker.close()
    agents[0].stop()
    assert not any(path.exists() for path in Path("/dev/shm").glob(agents[0]._folder.path.name))
    found, filled = newest(*agents), state(99)
    assert [copy.origin for copy in found.copies[0]] == ["copy"]
    assert load(found, filled)["step"] == 5
    assert equal(filled, state(5))


def test_strangers_are_not_heard(agents):
    for token in ("", "wrong"):
        with pytest.raises(ConnectionError):
            connect(agents[0].address, token)
    assert inventory([agents[0].address], "wrong").alive == ()
    with pytest.raises(ConnectionRefusedError):
        connect(Address("127.0.0.1", 1), TOKEN)
