"""A driver that takes the run over: what is left of the one before gives way, in its numbers and at the agents."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from tests.unit.checkpoint.helpers import Events, state
from tidewheel.checkpoint.memory_tier.agent import Agent
from tidewheel.checkpoint.memory_tier.client import MemoryTier
from tidewheel.checkpoint.memory_tier.protocol import connect
from tidewheel.checkpoint.memory_tier.restore import candidates, inventory
from tidewheel.commit_log import GENERATIONS_PER_EPOCH
from tidewheel.errors import CheckpointError

TOKEN = "secret"
OLD, NEW = 5, GENERATIONS_PER_EPOCH


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    made = [Agent(f"127.0.0.{host}", TOKEN, "epochs") for host in (1, 2)]
    yield made
    for agent in made:
        agent.stop()


def tier(agents: list[Agent], generation: int, events: Events | None = None) -> MemoryTier:
    addresses = [agent.address for agent in agents]
    return MemoryTier({0: addresses[0]}, addresses[0], addresses[1:], 0, 1, TOKEN, generation=generation,
                      on_event=events)


def keep(tier: MemoryTier, *steps: int) -> None:
    for step in steps:
        tier.snapshot(step, state(step), {"step": step})
        tier.flush()


def offered(agents: list[Agent]) -> list[tuple[int, int]]:
    result = candidates(inventory([agent.address for agent in agents], TOKEN))
    return [(one.generation, one.step) for one in result]


def test_the_new_epochs_steps_are_offered_first_although_it_counts_from_zero(agents):
    """The first driver was in its sixth generation, of which no event had reached storage."""
    before = tier(agents[:1], OLD)
    keep(before, 498, 499, 500)
    before.close()
    after = tier(agents[:1], NEW)
    keep(after, 451)
    assert offered(agents[:1])[0] == (NEW, 451)
    keep(after, 452, 453)
    assert offered(agents[:1]) == [(NEW, 453), (NEW, 452), (NEW, 451)], "what was before is let go"
    after.close()


def test_a_worker_of_an_earlier_epoch_is_refused(agents):
    stale, events = tier(agents, OLD, refusals := Events()), Events()
    keep(stale, 500)
    worker = tier(agents, NEW, events)
    keep(worker, 501)
    stale.snapshot(502, state(502), {"step": 502})
    stale.flush()
    assert not stale.working
    [(kind, detail)] = refusals
    assert kind == "memory_tier_lost"
    assert "generation 5 is of epoch 0, and epoch 1 of the run has begun" in detail["reason"]
    assert (OLD, 502) not in offered(agents)
    late = tier(agents, OLD + 1, refusals := Events())
    keep(late, 503)
    assert not late.working
    assert "has begun" in refusals[0][1]["reason"]
    stale.close()
    late.close()
    keep(worker, 502)
    assert worker.working
    assert events == []
    assert offered(agents)[0] == (NEW, 502)
    worker.close()


def test_what_a_killed_worker_of_an_earlier_epoch_had_just_filled_is_not_taken(agents):
    stale = tier(agents[:1], OLD)
    keep(stale, 1)
    keep(worker := tier(agents[:1], NEW), 2)
    slot = stale._slots[1] if len(stale._slots) > 1 else stale._slots[0]
    content = slot.content()
    assert content is not None
    slot.commit(type(content)(**{**asdict(content), "step": 9, "sequence": 9}))
    stale._connection.close()  # it was killed before it said so
    stale._lost = True
    while agents[0].store.num_workers > 1:
        time.sleep(0.01)
    assert [step for _, step in offered(agents[:1])] in ([2], [2, 1])
    worker.close()


def test_agents_without_workers_hear_of_the_new_epoch_by_its_first_question(agents):
    stale = tier(agents, OLD)
    keep(stale, 1)
    inventory([agent.address for agent in agents], TOKEN, generation=NEW)
    with pytest.raises(CheckpointError, match="epoch 1 of the run has begun"):
        agents[1].hear_of(OLD)
    keep(stale, 2)
    assert not stale.working
    connection = connect(agents[1].address, TOKEN)
    with pytest.raises(ConnectionError, match="has begun"):
        connection.ask({"op": "inventory", "generation": OLD})
    connection.close()
    assert [step for _, step in offered(agents)] == [1]
    stale.close()


def test_generations_of_one_epoch_are_not_fenced(agents):
    """Survivors may say something of the generation before while the next is formed."""
    for generation in (NEW + 1, NEW, NEW + 2):
        agents[0].hear_of(generation)
    assert agents[0].generation == NEW + 2
