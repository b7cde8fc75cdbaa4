"""States that may hold silent corruption are never loaded, whatever tier has them, and a good one is always kept."""

from __future__ import annotations

from pathlib import Path

from tests.unit.checkpoint.helpers import Events, equal, manager, state
from tests.unit.checkpoint.memory_tier.test_tiers import TOKEN, tiers
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.memory_tier.agent import Agent
from tidewheel.checkpoint.verify import list_checkpoints, newest_committed
from tidewheel.commit_log import CommitLog
from tidewheel.lease import Holder
from tidewheel.storage import LocalStore

DETAIL = {"step": 35, "ranks": [1]}


def owned(folder: Path) -> LocalStore:
    store = LocalStore(folder / "checkpoints")
    CommitLog(store).take_over(Holder.me(), None)
    return store


def save(store: LocalStore, generation: int, *steps: int, verified: int | None = None, keep_last: int = 9,
         ) -> CheckpointManager:
    saver = manager(store, Events(), asynchronous=False, generation=generation, keep_last=keep_last)
    for step in steps:
        saver.save(step, state(step), {"step": step, **({} if verified is None else {"verified": verified})})
    return saver


def complete(store: LocalStore) -> list[str]:
    return [info.name for info in list_checkpoints(store) if info.complete]


def test_later_states_of_these_workers_are_not_loaded_and_those_of_the_next_are(tmp_path: Path):
    store = owned(tmp_path)
    first = save(store, 0, 10, 20, 30)
    first.distrust(15, DETAIL)
    first.save(40, state(40), {"step": 40})  # the save was under way
    assert complete(store) == ["step_00000010"]
    assert newest_committed(store) == (0, 10)
    events, values = Events(), state(999)
    second = manager(store, events, asynchronous=False, generation=1)
    assert second.load_latest(values) == {"step": 10}
    assert equal(values, state(10))
    [refused] = events.of("checkpoint_refused")  # the clean-up after it deleted the others
    assert refused["checkpoint"] == "step_00000040"
    assert "corruption" in refused["reason"]
    second.save(20, state(21), {"step": 20})
    assert second.load_latest(values) == {"step": 20}
    assert equal(values, state(21))
    assert complete(store) == ["step_00000010", "step_00000020"]


def test_a_run_without_a_good_state_begins_anew(tmp_path: Path):
    store = owned(tmp_path)
    save(store, 0, 10).distrust(0, DETAIL)
    assert manager(store, Events(), generation=1).load_latest(state(999)) is None
    assert newest_committed(store) == (0, 0)


def test_the_newest_state_known_good_is_kept(tmp_path: Path):
    store = owned(tmp_path)
    save(store, 0, 10, 20, 30, 40, 50, verified=25, keep_last=2)
    assert complete(store) == ["step_00000020", "step_00000040", "step_00000050"]
    save(store, 0, 60, 70, verified=62, keep_last=2)
    assert complete(store) == ["step_00000060", "step_00000070"]


def test_memory_is_not_trusted_either(tmp_path: Path):
    agent = Agent("127.0.0.1", TOKEN, "suspects")
    try:
        first = tiers(tmp_path, [agent.address], 0, 1, 0, Events())
        first.save(3, state(3), {"step": 3})
        first.wait()
        for step in (4, 5):
            first.keep(step, state(step), {"step": step})
        assert not first.is_safe(5)  # waits for the copies
        first.distrust(4, DETAIL)
        values = state(999)
        second = tiers(tmp_path, [agent.address], 0, 1, 1, Events())
        assert second.load_latest(values) == {"step": 4, "tier": "memory"}
        assert equal(values, state(4))
        first.close()
        second.close()
    finally:
        agent.stop()
