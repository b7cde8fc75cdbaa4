"""Checkpoints of a run with an owner: which are valid, which writers are fenced, and which files may be deleted."""

from __future__ import annotations

import pytest

from tests.unit.checkpoint.helpers import Events, clear, equal, manager, state
from tidewheel.checkpoint.manifest import step_of
from tidewheel.checkpoint.retention import Keep, collect
from tidewheel.checkpoint.verify import list_checkpoints, newest_committed
from tidewheel.cluster.faults import flip_byte
from tidewheel.commit_log import CommitLog
from tidewheel.errors import OwnershipError
from tidewheel.lease import Holder
from tidewheel.storage import LocalStore


@pytest.fixture
def target(tmp_path) -> LocalStore:
    store = LocalStore(tmp_path / "run" / "checkpoints")
    CommitLog(store).take_over(Holder.me(), None)
    return store


def take_over(target: LocalStore) -> None:
    log = CommitLog(target)
    assert log.take_over(Holder.me(), log.head()) is not None


def save(target: LocalStore, step: int, generation: int, events: Events | None = None, **options):
    """Save `step` as worker group `generation` and return the manager."""
    saver = manager(target, events, asynchronous=False, generation=generation, **options)
    saver.save(step, state(step), {"step": step})
    return saver


def names(target: LocalStore) -> list[str]:
    return [info.name for info in list_checkpoints(target) if info.complete]


def newest(target: LocalStore) -> int | None:
    values = state(0)
    clear(values)
    extra = manager(target).load_latest(values)
    if extra is not None:
        assert equal(values, state(extra["step"]))
    return None if extra is None else extra["step"]


def test_a_driver_that_was_taken_over_commits_nothing_and_ends(target):
    save(target, 500, 0)
    events = Events()
    old = manager(target, events, asynchronous=False, generation=0)
    take_over(target)
    old.save(600, state(600), {"step": 600})
    assert "taken over" in events.of("save_failed")[0]["reason"]
    with pytest.raises(OwnershipError, match="taken over"):
        old.wait()
    assert names(target) == ["step_00000500"]
    assert newest(target) == 500
    checkpoints = {info.name: info for info in list_checkpoints(target)}
    assert not checkpoints["step_00000600"].committed
    assert "no longer owned the run" in checkpoints["step_00000600"].problem


def test_the_new_driver_saves_beside_what_the_old_one_left(target):
    save(target, 500, 0)
    old = manager(target, asynchronous=False, generation=0)
    take_over(target)
    old.save(600, state(601), {"step": 601})
    save(target, 600, 1_000_000)
    assert names(target) == ["step_00000500", "step_00000600-g1000000"]
    assert newest(target) == 600
    assert newest_committed(target) == (1, 600)


def test_the_last_commit_is_the_newest_even_with_a_lower_step(target):
    save(target, 400, 0)
    save(target, 500, 0)
    take_over(target)
    save(target, 450, 1_000_000)
    assert names(target)[-1] == "step_00000450"
    assert newest(target) == 450
    assert newest_committed(target) == (1, 450)


def test_a_worker_group_that_was_left_behind_commits_nothing(target):
    save(target, 10, 4)
    events = Events()
    save(target, 12, 3, events)
    assert "worker group 4 has committed since" in events.of("save_failed")[0]["reason"]
    assert newest(target) == 10


def test_a_step_saved_again_by_the_same_group_is_a_checkpoint_of_its_own(target):
    """For example, a guard rolled the run back to before a checkpoint that turned out to be damaged."""
    save(target, 10, 0)
    save(target, 20, 0)
    key = next(key for key in list_checkpoints(target)[-1].keys if key.endswith(".safetensors"))
    flip_byte(target, key, -5)
    save(target, 20, 0)
    assert len([info for info in list_checkpoints(target) if step_of(info.name) == 20]) == 2
    assert newest(target) == 20


def test_files_of_a_later_group_are_not_deleted(target):
    save(target, 10, 0)
    lagging = "step_00000005/rank_00000-g7-0123abcd.safetensors"
    target.write(lagging, b"a pending upload")
    target.write("step_00000006/rank_00000-g0-0123abcd.safetensors", b"left by an attempt of this group")
    collect(target, committed=10, keep=Keep(1), generation=0)
    keys = [entry.key for entry in target.list()]
    assert lagging in keys
    assert not [key for key in keys if key.startswith("step_00000006")]


def test_uncommitted_files_of_an_older_epoch_are_deleted(target):
    save(target, 10, 0)
    target.write("step_00000020/rank_00000-g0-0123abcd.safetensors", b"too late")
    take_over(target)
    save(target, 15, 1_000_000)
    assert not target.list("step_00000020")


def test_a_driver_that_was_taken_over_deletes_nothing(target):
    for step in (10, 20, 30):
        save(target, step, 0, keep_last=9)
    take_over(target)
    with pytest.raises(OwnershipError):
        collect(target, committed=30, keep=Keep(1), generation=0)
    assert names(target) == ["step_00000010", "step_00000020", "step_00000030"]


@pytest.mark.parametrize("generation", [None, 0])
def test_the_only_checkpoint_is_read_back_before_the_old_one_is_deleted(tmp_path, monkeypatch, generation):
    target = LocalStore(tmp_path / "checkpoints")
    if generation is not None:
        CommitLog(target).take_over(Holder.me(), None)
    events = Events()
    save(target, 10, generation, events, keep_last=1)
    written = LocalStore.writer

    def damaging(self, key):
        return _Damaged(written(self, key), self, key) if key.startswith("step_00000020/rank") else written(self, key)

    monkeypatch.setattr(LocalStore, "writer", damaging)
    saver = save(target, 20, generation, events, keep_last=1)
    assert "hash differs" in events.of("checkpoint_refused")[0]["reason"]
    assert newest(target) == 10
    saver.save(30, state(30), {"step": 30})
    assert newest(target) == 30
    assert not target.list("step_00000010")


class _Damaged:
    """A writer to a disk that changes one byte."""

    def __init__(self, inner, store, key) -> None:
        self.inner, self.store, self.key = inner, store, key

    def __enter__(self):
        return self.inner.__enter__()

    def __exit__(self, *error):
        result = self.inner.__exit__(*error)
        path = self.store.local_path(self.key)
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
        return result


def test_a_checkpoint_beside_a_run_that_has_an_owner_is_refused(target):
    events = Events()
    save(target, 10, None, events)
    assert "the run belongs to process" in events.of("save_failed")[0]["reason"]
