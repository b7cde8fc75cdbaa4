"""Ranks of several replicas hold the same parts: one of them is enough for a recovery."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.ranks import on_ranks
from tests.unit.checkpoint.helpers import Events, equal, manager, state
from tidewheel.checkpoint.memory_tier.agent import Agent
from tidewheel.checkpoint.memory_tier.holders import holders_of
from tidewheel.checkpoint.memory_tier.inventory import Copy, Inventory, candidates, inventory, newest_complete
from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.checkpoint.peers import Peers
from tidewheel.checkpoint.staging import flatten
from tidewheel.checkpoint.tiers import Placement, TieredCheckpoints
from tidewheel.storage import store

TOKEN = "secret"


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    results = [Agent("127.0.0.1", TOKEN, "replicas") for _ in range(2)]
    yield results
    for agent in results:
        agent.stop()


def replicated(seed: int, copies: int) -> dict:
    """Return the state in copies, each sharded over the other ranks."""
    mesh = init_device_mesh("cpu", (copies, dist.get_world_size() // copies), mesh_dim_names=("replicate", "shard"))
    values = state(seed)
    for group in values.values():
        for name, tensor in group.items():
            if tensor.ndim and tensor.numel():
                group[name] = distribute_tensor(tensor, mesh, [Replicate(), Shard(0)])
    return values


def tiers(folder: Path, addresses: list[Address], nodes: list[int], generation: int,
          events: Events) -> TieredCheckpoints:
    placement = Placement(tuple(addresses[node] for node in nodes), tuple(addresses), TOKEN)
    return TieredCheckpoints(manager(store(folder), events), placement, rank=dist.get_rank(), world_size=len(nodes),
                             generation=generation, replica=False, on_event=events)


def keep(folder: Path, addresses: list[Address]) -> None:
    """Keep steps 1 and 2 in two copies, one on each node, without copies of snapshots."""
    values = replicated(1, 2)
    assert holders_of(Peers(), flatten(values)) == (0, 1, 0, 1)
    both = tiers(folder, addresses, [0, 0, 1, 1], 0, Events())
    both.load_latest(values)
    for step in (1, 2):
        both.keep(step, replicated(step, 2), {"step": step, "rank": dist.get_rank()})
        both.is_safe(step)


def take(folder: Path, addresses: list[Address], node: int, lost: list[int]) -> None:
    """Load step 2 on two ranks of one node, sharded over them."""
    values, events = replicated(9, 1), Events()
    extra = tiers(folder, addresses, [node, node], 1, events).load_latest(values)
    assert extra == {"step": 2, "rank": 0, "tier": "memory"}
    assert equal(values, replicated(2, 1))
    restored = events.of("restored")
    assert len(restored) == (dist.get_rank() == 0)
    assert all((list(detail["bytes"]), detail["lost_parts"]) == (["own"], lost) for detail in restored)


def test_a_replica_on_another_node_makes_up_for_a_lost_one(agents: list[Agent], tmp_path: Path):
    addresses = [agent.address for agent in agents]
    on_ranks(4, keep, tmp_path, addresses)
    on_ranks(2, take, tmp_path, addresses, 0, [])
    agents[1].stop()
    on_ranks(2, take, tmp_path, addresses[:1], 0, [2, 3])
    held = inventory(addresses[:1], TOKEN)
    assert [step.step for step in candidates(held)] == [2, 1]
    assert newest_complete(held) is None, "an upload takes steps of which all parts are there"


def test_one_of_each_different_part_is_enough_if_that_of_the_first_rank_is_there():
    """Its `extra` has the lines of the run's logs that are not in storage yet."""
    agent = Address("node", 1)

    def complete(*ranks: int, num_shards: int = 2) -> bool:
        """Return whether the parts of these ranks of four make a step; ranks 0 and 2 hold the same, and 1 and 3."""
        copies = tuple(Copy(agent, rank, "own", "", 1, 0, rank, 4, 1, rank % 2 if num_shards else -1, num_shards)
                       for rank in ranks)
        return bool(candidates(Inventory(copies, (agent,), 0, 0, TOKEN)))

    assert complete(0, 1, 2, 3)
    assert complete(0, 1)
    assert complete(0, 3)
    assert not complete(0, 2), "half of the state is lost"
    assert not complete(1, 2), "the lines are lost"
    assert not complete(0, 1, num_shards=0), "who holds the same is not known"
