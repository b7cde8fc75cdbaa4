"""Whoever is asked to make way during an upload goes at once when memory holds the step; nothing is lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import on_ranks
from tests.unit.checkpoint.helpers import Events, HangingStore, manager, state
from tests.unit.train.helpers import Replaced, Script, config, write_shards
from tidewheel.checkpoint.memory_tier.agent import Agent
from tidewheel.checkpoint.tiers import Placement, TieredCheckpoints
from tidewheel.checkpoint.verify import list_checkpoints
from tidewheel.storage import Store, store
from tidewheel.train.loop import train
from tidewheel.train.runtime import Runtime, Saves
from tidewheel.train.save_schedule import SaveSchedule

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TOKEN = "secret"


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    made = [Agent(f"127.0.0.{host}", TOKEN, "make-way") for host in (1, 2)]
    yield made
    for agent in made:
        agent.stop()


def tiers(place: Store, agents: list[Agent], generation: int, events: Events, **options) -> TieredCheckpoints:
    addresses = tuple(agent.address for agent in agents)
    placement = Placement(addresses[:1], addresses[1:], TOKEN)
    return TieredCheckpoints(manager(place, events), placement, rank=0, world_size=1, generation=generation,
                             on_event=events, **options)


def steps(place: Store) -> list[int]:
    return [info.step for info in list_checkpoints(place) if info.complete]


def test_a_drain_does_not_wait_for_the_upload_and_the_next_generation_makes_up_for_it(tmp_path, agents):
    write_shards(tmp_path / "shards")
    settings = config(tmp_path, "drained", "data.validation=''", "checkpoint.every_steps=4")
    folder = Path(settings.run_uri) / "checkpoints"
    place, events, control = HangingStore(folder), Events(), Script(leave=5)
    first = tiers(place, agents, 0, events)
    try:
        with pytest.raises(Replaced, match="after step 5"):
            train(settings, Runtime(generation=0, checkpoints=first, control=control))
        assert place.entered.is_set()
        assert not place.released.is_set(), "it has gone while the store still hangs"
    finally:
        place.released.set()
        first.close()
    [abandoned] = events.of("save_abandoned")
    assert abandoned["step"] == 4
    assert "its workers stop for a change" in abandoned["reason"]
    assert events.of("save_failed") == []
    assert steps(store(folder)) == []
    control, second = Script(die=7), tiers(store(folder), agents, 1, Events())
    with pytest.raises(Replaced):
        train(settings, Runtime(generation=1, checkpoints=second, control=control))
    second.wait()
    second.close()
    [resumed] = [detail for kind, detail in control.events if kind == "resume"]
    assert (resumed["step"], resumed["redo"], resumed["tier"]) == (5, 0, "memory")
    assert [detail["step"] for kind, detail in control.events if kind == "save"] == [6], "at its first step boundary"
    assert steps(store(folder)) == [6]


def test_a_save_that_is_due_at_the_same_step_is_made_by_the_next_generation(tmp_path, agents):
    write_shards(tmp_path / "shards")
    settings = config(tmp_path, "due", "data.validation=''", "checkpoint.every_steps=4")
    run_store = store(Path(settings.run_uri) / "checkpoints")
    saved: list[list[int]] = []
    for generation, control in enumerate((Script(leave=4), Script(die=7))):
        both = tiers(run_store, agents, generation, Events())
        with pytest.raises(Replaced):
            train(settings, Runtime(generation=generation, checkpoints=both, control=control))
        both.wait()
        both.close()
        saved.append([detail["step"] for kind, detail in control.events if kind == "save"])
    assert saved == [[], [5]]


def test_a_drain_copies_the_step_to_memory_when_no_copy_is_due(tmp_path, agents):
    write_shards(tmp_path / "shards")
    settings = config(tmp_path, "seldom", "data.validation=''", "checkpoint.every_steps=100")
    run_store = store(Path(settings.run_uri) / "checkpoints")
    resumed: list[tuple[int, int, str]] = []
    for generation, control in enumerate((Script(leave=5), Script())):
        both = tiers(run_store, agents, generation, Events(), every_steps=1000)
        with contextlib.suppress(Replaced):
            train(settings, Runtime(generation=generation, checkpoints=both, control=control))
        both.wait()
        both.close()
        resumed += [(detail["step"], detail["redo"], detail["tier"]) for kind, detail in control.events
                    if kind == "resume"]
    assert resumed == [(5, 0, "memory")]
    assert steps(run_store) == [8], "the drain has saved nothing to storage"


def test_what_memory_does_not_hold_is_waited_for(tmp_path, agents):
    """One node: its loss would be the loss of the step."""
    write_shards(tmp_path / "shards")
    settings = config(tmp_path, "alone", "data.validation=''", "checkpoint.every_steps=4")
    place, control = store(Path(settings.run_uri) / "checkpoints"), Script(leave=4)
    alone = tiers(place, agents[:1], 0, Events())
    with pytest.raises(Replaced):
        train(settings, Runtime(checkpoints=alone, control=control))
    alone.close()
    assert steps(place) == [4]


def let_go(folder: Path) -> None:
    """Two ranks, of which one hangs in the store: both part in time, and can use their group again."""
    import torch.distributed as dist

    place, events = HangingStore(folder, "rank_00001"), Events()
    saved = manager(place, events)
    saved.save(1, state(1), {})
    if dist.get_rank() == 1:
        assert place.entered.wait(60)
    dist.barrier()
    began = time.monotonic()
    saved.let_go()
    assert time.monotonic() - began < 60
    assert saved.peers.all(dist.get_rank()) == [0, 1]
    if dist.get_rank() == 0:
        assert [kind for kind, _ in events] == ["save_abandoned"]
    saved.save(2, state(2), {})
    place.released.set()
    saved.wait()


def test_ranks_part_together(tmp_path):
    on_ranks(2, let_go, tmp_path)
    assert steps(store(tmp_path)) == [2]


def test_a_save_that_is_owed_is_due_until_one_begins():
    from tidewheel.train.checkpoint_config import CheckpointConfig

    schedule = SaveSchedule(CheckpointConfig(every_steps=100), started=0.0, failures=0)
    assert not schedule.due(7, Saves())
    schedule.owed = True
    assert schedule.due(7, Saves())
    assert not schedule.due(7, Saves(busy=True))
    schedule.began()
    assert not schedule.due(8, Saves())
