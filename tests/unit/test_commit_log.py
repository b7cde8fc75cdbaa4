"""The commit log on real stores: one owner, fenced writers, and stores that ignore the condition of a create."""

from __future__ import annotations

import json
import threading

import pytest

from tidewheel import commit_log, commit_protocol
from tidewheel.cluster.s3_server import S3Server
from tidewheel.commit_log import CommitLog, epoch_of, first_generation
from tidewheel.conditional_create import creates_are_conditional
from tidewheel.errors import OwnershipError, StorageAwayError, StorageError
from tidewheel.lease import Holder
from tidewheel.storage import LocalStore, Store, store


class Careless(LocalStore):
    """A store that ignores If-None-Match, as some S3 servers do."""

    def create(self, key: str, data: bytes) -> bool:
        self.write(key, data)
        return True

    def child(self, *parts: str) -> Store:
        return Careless(self.root.joinpath(*parts))


@pytest.fixture(params=["local", "careless", "s3"])
def checkpoints(request, tmp_path):
    if request.param == "s3":
        with S3Server() as server:
            yield store(f"{server.create_bucket('runs')}/run/checkpoints")
    else:
        yield (LocalStore if request.param == "local" else Careless)(tmp_path / "checkpoints")


def test_a_commit_counts_once_and_in_order(checkpoints):
    log = CommitLog(checkpoints)
    assert log.head() is None
    assert log.take_over(Holder.me(), None).epoch == 0
    log.commit("step_00000010", 0)
    log.commit("step_00000010", 0)
    head = log.commit("step_00000020", 1)
    assert (head.checkpoints, head.generation) == (("step_00000010", "step_00000020"), 1)
    assert log.retire(["step_00000010"], 0).checkpoints == ("step_00000020",)
    assert log.head() == log.retire(["step_00000010"], 0)


def test_a_driver_that_was_taken_over_commits_nothing(checkpoints):
    log = CommitLog(checkpoints)
    first = log.take_over(Holder.me(), None)
    log.commit("step_00000010", first_generation(first.epoch))
    head = log.head()
    assert log.take_over(Holder.me(), first) is None, "the log has moved on since"
    second = log.take_over(Holder.me(), head)
    assert (second.epoch, second.checkpoints) == (1, ("step_00000010",))
    with pytest.raises(OwnershipError, match="taken over by process"):
        log.commit("step_00000020", first_generation(first.epoch) + 7)
    with pytest.raises(OwnershipError, match="taken over by process"):
        log.retire(["step_00000010"], first.epoch)
    log.release(first.epoch)
    assert not log.head().released
    assert log.commit("step_00000020-g1000000", first_generation(1)).checkpoints[-1] == "step_00000020-g1000000"
    assert epoch_of(log.head().generation) == 1


def test_a_worker_group_that_was_left_behind_commits_nothing(checkpoints):
    log = CommitLog(checkpoints)
    log.take_over(Holder.me(), None)
    log.commit("step_00000010", 4)
    with pytest.raises(OwnershipError, match="worker group 4 has committed since"):
        log.commit("step_00000012", 3)
    assert log.head().checkpoints == ("step_00000010",)


def test_many_writers_lose_nothing(checkpoints):
    CommitLog(checkpoints).take_over(Holder.me(), None)
    errors: list[BaseException] = []

    def commit(writer: int) -> None:
        log = CommitLog(checkpoints)
        for step in range(4):
            for _ in range(20):
                try:
                    log.commit(f"step_{writer:04d}{step:04d}", 0)
                    break
                except StorageAwayError:  # other writers won every try
                    continue
            else:
                errors.append(AssertionError(f"writer {writer} won no try"))

    threads = [threading.Thread(target=commit, args=(writer,)) for writer in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(CommitLog(checkpoints).head().checkpoints) == sorted(
        f"step_{writer:04d}{step:04d}" for writer in range(3) for step in range(4))


def test_one_of_two_drivers_takes_a_run_over(checkpoints):
    results = []

    def take() -> None:
        results.append(CommitLog(checkpoints).take_over(Holder.me(), None))

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(result is not None for result in results) <= 1
    assert CommitLog(checkpoints).head().epoch == 0


def test_old_records_are_deleted(tmp_path):
    log = CommitLog(LocalStore(tmp_path))
    log.take_over(Holder.me(), None)
    for step in range(200):
        log.commit(f"step_{step:08d}", 0)
        log.retire([f"step_{step:08d}"], 0)
    names = [path.name for path in (tmp_path / commit_log.FOLDER).iterdir()]
    assert len(commit_protocol.slot_numbers(names)) <= 2 * commit_protocol.KEPT_SLOTS
    assert log.head().number == 400


@pytest.mark.parametrize("content", ["[]", "3", "{}", '{"epoch": "1"}', '{"epoch": 1}', '{"epoch": 1, "kind"', ""])
def test_a_damaged_record_is_named(tmp_path, content):
    log = CommitLog(LocalStore(tmp_path))
    log.take_over(Holder.me(), None)
    damaged = tmp_path / commit_log.FOLDER / commit_protocol.slot_name(1)
    damaged.write_text(content)
    for call in (log.head, lambda: log.commit("step_00000001", 1_000_000)):
        with pytest.raises(StorageError, match="a record is damaged") as error:
            call()
        assert "delete the damaged record" in error.value.fix
    damaged.unlink()
    assert log.head().epoch == 0


@pytest.mark.parametrize(("field", "value"), [
    ("epoch", True), ("kind", 3), ("owner", "me"), ("since", "noon"), ("time", None), ("generation", "7"),
    ("generation", 1.5), ("checkpoints", "step_00000001"), ("checkpoints", [1]), ("released", "no"), ("conditional", 0),
])
def test_a_field_of_a_wrong_type_is_named_wherever_it_is_read(tmp_path, field, value):
    log = CommitLog(LocalStore(tmp_path))
    log.take_over(Holder.me(), None)
    expected = log.head()
    slot = tmp_path / commit_log.FOLDER / commit_protocol.slot_name(0)
    slot.write_text(json.dumps({**json.loads(slot.read_text()), field: value}))
    for call in (log.head, lambda: log.commit("step_00000001", 0), lambda: log.retire(["step_00000001"], 0),
                 lambda: log.take_over(Holder.me(), expected)):
        with pytest.raises(StorageError, match="a record is damaged") as error:
            call()
        assert field in error.value.what
        assert str(tmp_path) in error.value.where
        assert "delete the damaged record" in error.value.fix


@pytest.mark.parametrize(("owner", "problem"), [
    ({"pid": "7"}, "'owner.pid' is '7'"), ({"host": None}, "'owner.host' is None")])
def test_a_wrong_field_of_the_owner_is_named(tmp_path, owner, problem):
    log = CommitLog(LocalStore(tmp_path))
    log.take_over(Holder.me(), None)
    slot = tmp_path / commit_log.FOLDER / commit_protocol.slot_name(0)
    values = json.loads(slot.read_text())
    slot.write_text(json.dumps({**values, "owner": {**values["owner"], **owner}}))
    with pytest.raises(StorageError, match=problem) as error:
        log.head()
    assert error.value.where.endswith("00000000.json")


def test_fields_that_a_later_release_added_are_ignored(tmp_path):
    log = CommitLog(LocalStore(tmp_path))
    log.take_over(Holder.me(), None)
    head = log.head()
    slot = tmp_path / commit_log.FOLDER / commit_protocol.slot_name(0)
    values = json.loads(slot.read_text())
    slot.write_text(json.dumps({**values, "region": "north", "owner": {**values["owner"], "cluster": "c"}}))
    assert log.head() == head


@pytest.mark.parametrize("content", ["[]", "3", '{"beat": 1}', '{"beat": [], "time": 1.0}', '{"beat": 1, "time": "x"}'])
def test_a_damaged_heartbeat_is_named(tmp_path, content):
    log = CommitLog(LocalStore(tmp_path))
    log.beat(0, 3)
    assert log.last_beat(0)[0] == 3
    [alive] = (tmp_path / commit_log.FOLDER).glob("alive-*")
    alive.write_text(content)
    with pytest.raises(StorageError, match="the owner's heartbeat is damaged") as error:
        log.last_beat(0)
    assert error.value.where.endswith(alive.name)


def test_a_probe_tells_whether_creates_are_conditional(checkpoints):
    assert creates_are_conditional(checkpoints) is not isinstance(checkpoints, Careless)
    assert not [entry for entry in checkpoints.list() if "probe" in entry.key]
