"""States in memory, damaged at random: what is read is the newest that has a whole copy somewhere, and nothing else."""

from __future__ import annotations

import random

import pytest

from tests.unit.checkpoint.helpers import equal, state
from tidewheel.checkpoint.memory_tier.agent import Agent
from tidewheel.checkpoint.memory_tier.client import MemoryTier
from tidewheel.checkpoint.memory_tier.part_store import Part
from tidewheel.checkpoint.memory_tier.replicas import replica_candidates
from tidewheel.checkpoint.memory_tier.restore import candidates, inventory, load
from tidewheel.errors import CheckpointError

TOKEN, STEPS, CASES = "secret", (1, 2, 3), 60


def damage(part: Part, rng: random.Random) -> None:
    """One bit anywhere, or a stretch of zeros with something else than zeros in it."""
    content = part.slot.bytes
    at = rng.randrange(part.content.end)
    if rng.random() < 0.7:
        content[at] ^= 1 << rng.randrange(8)
        return
    while not content[at]:
        at = rng.randrange(part.content.end)
    for place in range(at, min(at + rng.randint(1, 64), part.content.end)):
        content[place] = 0


@pytest.mark.parametrize("first", range(0, CASES, 20))
def test_no_damaged_state_is_ever_read(first: int):
    fallen_back = 0
    for case in range(first, first + 20):
        rng = random.Random(case)
        agents = [Agent("127.0.0.1", TOKEN, f"case{case}") for _ in range(2)]
        try:
            fallen_back += check(agents, rng, case)
        finally:
            for agent in agents:
                agent.stop()
    assert fallen_back > 2


def check(agents: list[Agent], rng: random.Random, case: int) -> bool:
    """Whether an older state than the newest had to be taken."""
    addresses = [agent.address for agent in agents]
    own_agent = addresses[0]
    worker = MemoryTier(dict(enumerate(addresses)), own_agent, replica_candidates(addresses, own_agent), 0, 1, TOKEN)
    for step in STEPS:
        worker.snapshot(step, state(step), {"step": step})
        assert worker.flush()
    parts = [part for agent in agents for part in agent.store.parts()]
    newest = [part for part in parts if part.content.step == STEPS[-1]]
    assert {part.origin for part in newest} == {"own", "copy"}
    victims = newest if rng.random() < 0.3 else rng.sample(parts, rng.randint(1, len(parts)))
    for part in victims:
        damage(part, rng)
    whole = {part.content.step for part in parts if part not in victims}
    taken = None
    for found in candidates(inventory(addresses, TOKEN)):
        values = state(99)
        try:
            extra = load(found, values, own_agent=own_agent if rng.random() < 0.5 else None)
        except CheckpointError:
            assert found.step not in whole, f"case {case}: step {found.step} has a whole copy"
            continue
        assert extra == {"step": found.step}, f"case {case}"
        assert equal(values, state(found.step)), f"case {case}: a damaged state was read"
        taken = found.step
        break
    # a bit of the padding between tensors harms nobody: then a damaged part is read, and equal
    assert (taken or 0) >= max(whole, default=0), f"case {case}: a whole state was passed over"
    worker.close()
    return taken != STEPS[-1]
