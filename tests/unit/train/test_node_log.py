"""Tests of the ledger that a node's ranks write together: one request a minute, and lines are lost only with the node.
"""

import multiprocessing
import os
import signal
import stat
import time
import uuid

import pytest

from tidewheel import jsonlog
from tidewheel.cluster.s3_server import S3Server
from tidewheel.errors import StorageError
from tidewheel.storage import store
from tidewheel.train import node_log
from tidewheel.train.node_log import NodeLog, node_folder
from tidewheel.train.runtime import Runtime
from tidewheel.train.time_ledger import summarise
from tidewheel.train.timeline import Timeline, ledger

KEY = "ledger.jsonl"


@pytest.fixture(scope="module")
def server():
    with S3Server() as running:
        running.create_bucket("logs")
        yield running


@pytest.fixture
def place(server, tmp_path, monkeypatch):
    monkeypatch.setattr(node_log.tempfile, "gettempdir", lambda: str(tmp_path))
    return store(f"s3://logs/{uuid.uuid4().hex}")


@pytest.fixture
def puts(place, monkeypatch):
    """Keys that are put, in turn."""
    found, real = [], type(place).write
    monkeypatch.setattr(type(place), "write", lambda *given: found.append(given[1]) or real(*given))
    return found


def line(rank: int, number: int) -> dict:
    return {"rank": rank, "number": number, "end": time.time()}


def numbers(place) -> list[tuple[int, int]]:
    return sorted((one["rank"], one["number"]) for one in jsonlog.read(place, KEY))


def test_a_node_uploads_once_in_a_while_for_all_its_ranks(place, puts, monkeypatch):
    ranks = [NodeLog(place, KEY, generation=3, rank=rank) for rank in range(8)]
    for number in range(5):
        for rank, log in enumerate(ranks):
            log.append(line(rank, number))
            log.flush_soon()
    assert puts == []
    monkeypatch.setattr(node_log, "SECONDS", 0.0)
    ranks[5].flush_soon()
    ranks[5]._thread.join(60)
    monkeypatch.setattr(node_log, "SECONDS", 60.0)
    assert len(puts) == 1
    assert numbers(place) == [(rank, number) for rank in range(8) for number in range(5)]
    for rank, log in enumerate(ranks):
        log.append(line(rank, 5))
        log.flush()
    assert set(puts) == {puts[0]}  # by the same rank, which puts the same object again
    ranks[5].flush()
    assert numbers(place) == [(rank, number) for rank in range(8) for number in range(6)]
    assert not list(node_folder(place, KEY).glob("*.jsonl"))


def test_ranks_finish_in_any_order_without_losing_lines(place):
    ranks = [NodeLog(place, KEY, generation=0, rank=rank) for rank in range(3)]
    ranks[1].flush()  # has the lock
    for rank, log in enumerate(ranks):
        log.append(line(rank, 0))
    for rank in (1, 0, 2):
        ranks[rank].finish()
        ranks[rank].close()
    assert numbers(place) == [(0, 0), (1, 0), (2, 0)]


def _die(uri: str, rank: int, first: bool) -> None:
    log = NodeLog(store(uri), KEY, generation=0, rank=rank)
    if first:
        log.flush()
    log.append(line(rank, 0))
    log.flush_soon()
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_next_generation_uploads_files_of_killed_ranks(place):
    context = multiprocessing.get_context("spawn")
    os.environ["TMPDIR"] = str(node_folder(place, KEY).parents[1])
    try:
        for rank, first in ((0, True), (1, False)):
            child = context.Process(target=_die, args=(place.uri, rank, first))
            child.start()
            child.join(120)
            assert child.exitcode == -signal.SIGKILL
    finally:
        del os.environ["TMPDIR"]
    assert numbers(place) == []
    survivor = NodeLog(place, KEY, generation=1, rank=0)
    survivor.append(line(7, 7))
    survivor.flush()
    assert numbers(place) == [(0, 0), (1, 0), (7, 7)]


def test_while_the_store_fails_lines_stay_on_the_node(place, monkeypatch):
    log, other = (NodeLog(place, KEY, generation=0, rank=rank) for rank in range(2))
    log.flush()
    with monkeypatch.context() as broken:
        broken.setattr(type(place), "write", lambda *_: (_ for _ in ()).throw(StorageError("away")))
        for number in range(3):
            log.append(line(0, number))
            other.append(line(1, number))
            other.flush_soon()
            with pytest.raises(StorageError):
                log.flush()
        assert len(list(node_folder(place, KEY).glob("*.jsonl"))) == 6
        log.close()
    log.close()
    other.flush()
    assert numbers(place) == [(rank, number) for rank in range(2) for number in range(3)]
    assert not list(node_folder(place, KEY).glob("*.jsonl"))


def test_lines_beyond_the_limit_are_dropped_and_reported(place, monkeypatch):
    monkeypatch.setattr(node_log, "MAX_PENDING_BYTES", 1000)
    first, log = (NodeLog(place, KEY, generation=0, rank=rank) for rank in range(2))
    first.flush()
    for number in range(100):
        log.append({"rank": 1, "number": number, "end": 1.0})
        log.flush_soon()
    held = sum(path.stat().st_size for path in node_folder(place, KEY).glob("*.jsonl"))
    assert 500 < held <= 1000 + 100
    first.flush()
    left = numbers(place)
    assert left == [(1, number) for number in range(100 - len(left), 100)]
    content = b"".join(place.read(entry.key) for entry in place.list(KEY)).decode()
    assert content.count("log_dropped") > 0


@pytest.mark.parametrize("how", ["open to others", "a link", "a file"])
def test_a_folder_that_is_not_ours_alone_is_not_used(place, puts, tmp_path, how):
    folder = node_folder(place, KEY)
    match how:
        case "open to others":
            folder.mkdir(parents=True)
            folder.parent.chmod(0o777)
        case "a link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            folder.parent.symlink_to(tmp_path / "elsewhere")
        case "a file":
            folder.parent.write_text("")
    ranks = [NodeLog(place, KEY, generation=0, rank=rank) for rank in range(2)]
    for rank, log in enumerate(ranks):
        log.append(line(rank, 0))
        log.flush()
    assert numbers(place) == [(0, 0), (1, 0)]
    assert len(set(puts)) == 2  # each for itself
    assert not list(tmp_path.rglob("*-*.jsonl"))


def test_the_folder_is_this_users_alone(place):
    NodeLog(place, KEY, generation=0, rank=0).flush()
    folder = node_folder(place, KEY)
    for path in (folder, folder.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert str(os.getuid()) in folder.parent.name


def test_lines_of_a_deleted_run_of_the_same_name_are_not_taken(place):
    old, new = (NodeLog(place, KEY, generation=0, rank=rank) for rank in range(2))
    old.append(line(0, 0))
    old.flush_soon()
    new.append(line(1, 1))
    new.flush_soon()
    (left,) = (path for path, _, _ in old._handed)
    os.utime(left, (time.time() - 9000, time.time() - 9000))
    place.write_json("run.json", {"started": time.time() - 60})
    new.flush()
    assert numbers(place) == [(1, 1)]
    assert not list(node_folder(place, KEY).glob("*.jsonl"))


def test_the_parts_of_all_ranks_sum_to_the_time_they_were_there(place):
    began = time.time() - 100
    lines = [Timeline(ledger(place, Runtime(rank=rank, world_size=4, node="n")), Runtime(rank=rank, node="n"), began)
             for rank in range(4)]
    for category in ("restart", "productive", "save_stall", "productive"):
        for one in lines:
            time.sleep(0.002)
            one.spent(category)
            one.flush()
    for one in lines:
        one.finish()
        one.close()
    records = jsonlog.read(place, KEY)
    for rank, one in enumerate(lines):  # each rank's intervals join, from its beginning to its last
        mine = sorted((record for record in records if record["rank"] == rank), key=lambda record: record["start"])
        assert [record["start"] for record in mine] == [began, *(record["end"] for record in mine[:-1])]
        assert mine[-1]["end"] == one._mark
    found = summarise(records, [])
    assert sum(found.parts.values()) == pytest.approx(found.worker_seconds, abs=1e-6)
    assert found.worker_seconds == pytest.approx(4 * found.wall_seconds)
    assert isinstance(ledger(place, Runtime()), NodeLog)
