"""Memory above storage: what is newest is taken, by all ranks alike, in any number of them."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import on_ranks
from tests.unit.checkpoint.helpers import Events, clear, equal, manager, state
from tests.unit.train.helpers import Replaced, Script, config, write_shards
from tidewheel import jsonlog, storage
from tidewheel.checkpoint.manifest import read_manifest
from tidewheel.checkpoint.memory_tier.agent import Agent
from tidewheel.checkpoint.memory_tier.part_reader import PartReader
from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.checkpoint.tiers import Placement, TieredCheckpoints
from tidewheel.checkpoint.verify import list_checkpoints, verify_checkpoint
from tidewheel.storage import store
from tidewheel.train.loop import train
from tidewheel.train.runtime import Runtime

TOKEN = "secret"


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    results = [Agent("127.0.0.1", TOKEN, "tiers") for _ in range(2)]
    yield results
    for agent in results:
        agent.stop()


def tiers(folder: Path, addresses: list[Address], rank: int, world_size: int, generation: int, events: Events,
          **options) -> TieredCheckpoints:
    placement = Placement(tuple(addresses[item % len(addresses)] for item in range(world_size)), tuple(addresses),
                          TOKEN)
    return TieredCheckpoints(manager(store(folder), events), placement, rank=rank, world_size=world_size,
                             generation=generation, on_event=events, **options)


def keep(folder: Path, addresses: list[Address], steps: range, generation: int) -> None:
    """Save the first of `steps`, keep all, and end as if killed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    both = tiers(folder, addresses, rank, size, generation, Events())
    assert both.load_latest(state(999, mesh)) is None  # as a run does first; the ranks agree on the rules
    for step in steps:
        values = state(step, mesh)
        if step == steps[0]:
            both.save(step, values, {"step": step})
        assert both.keeps(step)
        both.keep(step, values, {"step": step})
        clear(values)
    assert both.is_safe(steps[-1])
    assert not both.is_safe(steps[0])
    both.wait()


def take(folder: Path, addresses: list[Address], step: int, tier: str, refused: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    events, values = Events(), state(999, init_device_mesh("cpu", (size,)))
    extra = tiers(folder, addresses, rank, size, 9, events).load_latest(values)
    assert extra is not None
    assert (extra["step"], extra.get("tier", "storage")) == (step, tier)
    assert equal(values, state(step, init_device_mesh("cpu", (size,))))
    assert len(events.of("memory_refused")) == refused * (rank == 0)


def damage(agents: list[Agent], step: int, rank: int) -> None:
    for agent in agents:
        for part in agent.store.parts():
            if (part.content.step, part.content.rank) == (step, rank):
                part.slot.bytes[part.content.end - 20] ^= 1


def test_the_newest_intact_step_whoever_kept_it(tmp_path, agents):
    """Three ranks keep, two and one take; then the newest is damaged in both copies, and then memory is gone."""
    addresses = [agent.address for agent in agents]
    on_ranks(3, keep, tmp_path, addresses, range(2, 6), 0)
    on_ranks(2, take, tmp_path, addresses, 5, "memory", 0)
    damage(agents, 5, 1)
    on_ranks(2, take, tmp_path, addresses, 4, "memory", 1)
    values = state(999)
    assert tiers(tmp_path, addresses, 0, 1, 9, Events()).load_latest(values) == {"step": 4, "tier": "memory"}
    assert equal(values, state(4))
    agents[0].stop()
    values = state(999)
    extra = tiers(tmp_path, addresses[1:], 0, 1, 9, Events()).load_latest(values)
    assert extra == {"step": 4, "tier": "memory"}  # all of the lost node from the copies
    agents[1].stop()
    values = state(999)
    assert tiers(tmp_path, addresses[1:], 0, 1, 9, Events()).load_latest(values) == {"step": 2}
    assert equal(values, state(2))


def take_alike(folder: Path, addresses: list[Address], step: int) -> None:
    """Load in the layout that kept the step, and count the parts whose tables this rank asks for."""
    asked = []
    describe = PartReader.describe
    PartReader.describe = lambda part: (asked.append(part), describe(part))[1]  # type: ignore[assignment, misc, method-assign]
    take(folder, addresses, step, "memory", 0)
    # the part of this rank and the copy beside it are on its node; the first rank needs the position, too
    assert len(asked) <= 2 + (dist.get_rank() == 0)


def test_a_rank_asks_only_those_that_have_what_it_needs(tmp_path, agents):
    agents += [Agent("127.0.0.1", TOKEN, "tiers") for _ in range(2)]
    addresses = [agent.address for agent in agents]
    on_ranks(4, keep, tmp_path, addresses, range(2, 4), 0)
    on_ranks(4, take_alike, tmp_path, addresses, 3)


def test_storage_that_is_newer_is_taken(tmp_path, agents):
    both = tiers(tmp_path, [agents[0].address], 0, 1, 0, Events())
    both.keep(3, state(3), {"step": 3})
    both.save(7, state(7), {"step": 7})
    both.wait()
    values = state(999)
    assert both.load_latest(values) == {"step": 7}
    assert equal(values, state(7))
    both.keep(8, state(8), {"step": 8})
    assert not both.is_safe(8)  # one agent: nowhere else
    assert both.load_latest(values) == {"step": 8, "tier": "memory"}
    assert both.load_latest(values, lambda extra: extra["step"] < 8) == {"step": 7}
    assert equal(values, state(7))
    assert both.load_latest(values, lambda extra: extra["step"] < 7) is None
    assert both.load_saved(values) == {"step": 7}  # a rollback
    assert both.load_latest(values) == {"step": 7}
    both.close()


def test_a_state_of_another_shape_is_refused_by_the_rules(tmp_path, agents):
    both = tiers(tmp_path, [agents[0].address], 0, 1, 0, Events())
    assert both.load_latest(state(999)) is None
    both.keep(3, state(3), {"step": 3})
    both.is_safe(3)
    values, events = state(999), Events()
    values["model"]["wide"] = torch.zeros(3)
    assert tiers(tmp_path, [agents[0].address], 0, 1, 1, events).load_latest(values) is None
    assert "wide" in events.of("memory_refused")[0]["reason"]
    both.close()


def keep_newest(folder: Path, addresses: list[Address], agree: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    both = tiers(folder, addresses, rank, size, 0, Events())
    if agree:
        assert both.load_latest(state(999, init_device_mesh("cpu", (size,)))) is None
    for step in (4, 5):
        both.keep(step, state(step, init_device_mesh("cpu", (size,))), {"step": step, "text": "kept"})


@pytest.mark.parametrize("agree", [True, False], ids=["with rules", "without"])
def test_agents_upload_what_a_lost_run_has_left(tmp_path, agree):
    """Two ranks end without a save; of their agents one, and only one, writes a checkpoint like any other."""
    both = [Agent("127.0.0.1", TOKEN, "tiers", upload_seconds=1.0) for _ in range(2)]
    folder = tmp_path / "run" / "checkpoints"
    on_ranks(2, keep_newest, folder, [agent.address for agent in both], agree)
    until = time.monotonic() + 120
    while not (checkpoints := list_checkpoints(store(folder))) or not checkpoints[-1].complete:
        assert time.monotonic() < until
        time.sleep(0.1)
    while not all(agent.stopped.is_set() for agent in both):  # each has decided whether it uploads
        assert time.monotonic() < until
        time.sleep(0.1)
    for agent in both:
        agent.stop()
    assert verify_checkpoint(store(folder), "step_00000005") == []
    values = state(999)
    assert manager(store(folder)).load_latest(values) == {"step": 5, "text": "kept"}
    assert equal(values, state(5))
    manifest = read_manifest(store(folder), "step_00000005")
    assert len(list(manifest.chunks("optimizer/half"))) == 1  # a replica: written once
    assert all((entry.shared is not None) == agree for entry in manifest.tensors.values())
    with safe_open(folder / "step_00000005" / manifest.files[1].key, "pt") as file:
        assert torch.equal(file.get_tensor("model/wide@2,0,0"), state(5)["model"]["wide"][2:])
    lines = jsonlog.read(store(tmp_path / "run"), "events.jsonl")
    assert [(line["kind"], line["detail"]["by"]) for line in lines] == [("commit", "memory agent")]


def test_a_run_goes_on_from_memory_and_ends_the_same(tmp_path, agents):
    """It dies after steps 4 and 7, before they are kept: those two are done again, and no other."""
    write_shards(tmp_path / "shards")
    whole = train(config(tmp_path, "whole", "data.validation=''"), Runtime())
    settings, resumed = config(tmp_path, "killed", "data.validation=''", "checkpoint.every_steps=3"), []
    for generation, die in enumerate((4, 7, -1)):
        both = tiers(Path(settings.run_uri) / "checkpoints", [agent.address for agent in agents], 0, 1, generation,
                     Events())
        control = Script(die=die)
        try:
            result = train(settings, Runtime(generation=generation, checkpoints=both, control=control))
        except Replaced:
            continue
        finally:
            both.close()
            resumed += [(detail["step"], detail["redo"], detail["tier"]) for kind, detail in control.events
                        if kind == "resume"]
    assert result.loss == whole.loss
    assert resumed == [(3, 1, "memory"), (6, 1, "memory")]
    lines = jsonlog.read(storage.store(settings.run_uri), "batches.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4, 5, 6, 7, 7, 8]
