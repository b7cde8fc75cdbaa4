"""Workers and agents are killed at any instant: what is left is whole, and as new as was promised."""

import random
import time
from collections.abc import Iterator

import pytest

from tests.unit.checkpoint.helpers import clear, equal
from tests.unit.checkpoint.memory_tier.processes import CONTEXT, RUN, TOKEN, AgentProcess, Trainer, whole
from tidewheel.checkpoint.memory_tier import client
from tidewheel.checkpoint.memory_tier.restore import Recoverable, inventory, load, newest_complete
from tidewheel.checkpoint.memory_tier.slots import SHARED_MEMORY, sweep

ROUNDS = 9


@pytest.fixture(scope="module")
def agents() -> Iterator[list[AgentProcess]]:
    results = [AgentProcess.start() for _ in range(2)]
    yield results
    for agent in results:
        agent.kill()
    sweep()
    wait_for_folders(0)


def wait_for_folders(count: int) -> None:
    """Wait until the run's agents have `count` folders: agents of other tests here may be sweeping the same ones."""
    until = time.monotonic() + 60
    while len(folders := list(SHARED_MEMORY.glob(f"*{RUN}*"))) != count:
        assert time.monotonic() < until, folders
        time.sleep(0.02)


def found_at_least(agents: list[AgentProcess], generation: int, step: int) -> Recoverable:
    """What is in memory, once the agents have done what the workers had handed over."""
    until = time.monotonic() + 120
    while True:
        result = newest_complete(inventory([agent.address for agent in agents], TOKEN))
        if result is not None and (result.generation, result.step) >= (generation, step):
            return result
        assert time.monotonic() < until, f"{result} is not of generation {generation}, step {step}"
        time.sleep(0.02)


def test_whoever_is_killed_the_newest_whole_step_comes_back(agents):
    """One generation after the other on the same two nodes; each begins where the one before was restored."""
    generator, step = random.Random(5), 0
    for generation in range(ROUNDS):
        barrier = CONTEXT.Barrier(2)
        addresses = [agent.address for agent in agents]
        trainers = [Trainer.start(addresses, rank, generation, step + 1, barrier) for rank in range(2)]
        while min(trainer.done.value for trainer in trainers) < step + 1 + generation % 3:
            time.sleep(0.001)
        time.sleep(generator.random() * 0.05)
        victim, node = generator.randrange(2), generation % 3 == 2
        trainers[victim].kill()
        if node:
            agents[victim].kill()
        time.sleep(generator.random() * 0.02)
        trainers[1 - victim].kill()
        kept = min(trainer.done.value for trainer in trainers)
        result = found_at_least([agents[1 - victim]] if node else agents, generation, kept - node)
        assert result.world_size == 2
        state = whole(-1, 2)
        clear(state)
        own_agent = agents[1 - victim].address if generator.random() < 0.5 else None
        assert load(result, state, own_agent=own_agent) == {"step": result.step}
        assert equal(state, whole(result.step, 2))
        step = result.step
        if node:
            agents[victim] = AgentProcess.start()
            wait_for_folders(2)  # it deletes what the dead one left on the same machine


def test_both_nodes_lost_is_lost(agents):
    barrier = CONTEXT.Barrier(2)
    trainers = [Trainer.start([agent.address for agent in agents], rank, 1000, 1, barrier) for rank in range(2)]
    found_at_least(agents, 1000, 3)
    for rank in range(2):
        trainers[rank].kill()
        agents[rank].kill()
        agents[rank] = AgentProcess.start()
    assert newest_complete(inventory([agent.address for agent in agents], TOKEN)) is None


def test_training_goes_on_without_an_agent_that_freezes_before_it_gives_a_slot(monkeypatch: pytest.MonkeyPatch):
    agent = AgentProcess.start()
    tier = client.MemoryTier({0: agent.address}, agent.address, [], 0, 1, TOKEN)
    state = whole(1, 1)
    tier.prepare(state)
    tier.snapshot(1, state, {"step": 1})
    tier.flush()
    assert tier.working
    monkeypatch.setattr(client, "ALLOCATE_SECONDS", 0.3)
    agent.freeze()
    tier.snapshot(2, state, {"step": 2})
    assert tier._lost
    tier.snapshot(3, state, {"step": 3})
    tier.settle()
    tier.close()
    agent.kill()
    sweep()
