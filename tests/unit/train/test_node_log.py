"""Tests of the ledger that a node's ranks share: one request a minute, and only the loss of the node loses lines.
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
def run_store(server, tmp_path, monkeypatch):
    monkeypatch.setattr(node_log.tempfile, "gettempdir", lambda: str(tmp_path))
    return store(f"s3://logs/{uuid.uuid4().hex}")


@pytest.fixture
def puts(run_store, monkeypatch):
    """Return a list of the keys of all writes."""
    keys = []
    real = type(run_store).write
    monkeypatch.setattr(type(run_store), "write", lambda *arguments: keys.append(arguments[1]) or real(*arguments))
    return keys


def line(rank: int, index: int) -> dict:
    return {"rank": rank, "index": index, "end": time.time()}


def written_lines(run_store) -> list[tuple[int, int]]:
    return sorted((record["rank"], record["index"]) for record in jsonlog.read(run_store, KEY))


def test_a_node_uploads_once_in_a_while_for_all_its_ranks(run_store, puts, monkeypatch):
    ranks = [NodeLog(run_store, KEY, generation=3, rank=rank) for rank in range(8)]
    for index in range(5):
        for rank, log in enumerate(ranks):
            log.append(line(rank, index))
            log.flush_soon()
    assert puts == []
    monkeypatch.setattr(node_log, "SECONDS", 0.0)
    ranks[5].flush_soon()
    ranks[5]._thread.join(60)
    monkeypatch.setattr(node_log, "SECONDS", 60.0)
    assert len(puts) == 1
    assert written_lines(run_store) == [(rank, index) for rank in range(8) for index in range(5)]
    for rank, log in enumerate(ranks):
        log.append(line(rank, 5))
        log.flush()
    assert set(puts) == {puts[0]}  # the same rank writes the same object again
    ranks[5].flush()
    assert written_lines(run_store) == [(rank, index) for rank in range(8) for index in range(6)]
    assert not list(node_folder(run_store, KEY).glob("*.jsonl"))


def test_ranks_finish_in_any_order_without_losing_lines(run_store):
    ranks = [NodeLog(run_store, KEY, generation=0, rank=rank) for rank in range(3)]
    ranks[1].flush()  # holds the lock
    for rank, log in enumerate(ranks):
        log.append(line(rank, 0))
    for rank in (1, 0, 2):
        ranks[rank].finish()
        ranks[rank].close()
    assert written_lines(run_store) == [(0, 0), (1, 0), (2, 0)]


def _die(uri: str, rank: int, first: bool) -> None:
    log = NodeLog(store(uri), KEY, generation=0, rank=rank)
    if first:
        log.flush()
    log.append(line(rank, 0))
    log.flush_soon()
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_next_generation_uploads_files_of_killed_ranks(run_store):
    context = multiprocessing.get_context("spawn")
    os.environ["TMPDIR"] = str(node_folder(run_store, KEY).parents[1])
    try:
        for rank, first in ((0, True), (1, False)):
            child = context.Process(target=_die, args=(run_store.uri, rank, first))
            child.start()
            child.join(120)
            assert child.exitcode == -signal.SIGKILL
    finally:
        del os.environ["TMPDIR"]
    assert written_lines(run_store) == []
    survivor = NodeLog(run_store, KEY, generation=1, rank=0)
    survivor.append(line(7, 7))
    survivor.flush()
    assert written_lines(run_store) == [(0, 0), (1, 0), (7, 7)]


def test_while_the_store_fails_lines_stay_on_the_node(run_store, monkeypatch):
    log, other = (NodeLog(run_store, KEY, generation=0, rank=rank) for rank in range(2))
    log.flush()
    with monkeypatch.context() as broken:
        broken.setattr(type(run_store), "write", lambda *_: (_ for _ in ()).throw(StorageError("away")))
        for index in range(3):
            log.append(line(0, index))
            other.append(line(1, index))
            other.flush_soon()
            with pytest.raises(StorageError):
                log.flush()
        assert len(list(node_folder(run_store, KEY).glob("*.jsonl"))) == 6
        log.close()
    log.close()
    other.flush()
    assert written_lines(run_store) == [(rank, index) for rank in range(2) for index in range(3)]
    assert not list(node_folder(run_store, KEY).glob("*.jsonl"))


def test_lines_beyond_the_limit_are_dropped_and_reported(run_store, monkeypatch):
    monkeypatch.setattr(node_log, "MAX_PENDING_BYTES", 1000)
    first, log = (NodeLog(run_store, KEY, generation=0, rank=rank) for rank in range(2))
    first.flush()
    for index in range(100):
        log.append({"rank": 1, "index": index, "end": 1.0})
        log.flush_soon()
    held = sum(path.stat().st_size for path in node_folder(run_store, KEY).glob("*.jsonl"))
    assert 500 < held <= 1000 + 100
    first.flush()
    left = written_lines(run_store)
    assert left == [(1, index) for index in range(100 - len(left), 100)]
    content = b"".join(run_store.read(entry.key) for entry in run_store.list(KEY)).decode()
    assert content.count("log_dropped") > 0


@pytest.mark.parametrize("how", ["open to others", "a link", "a file"])
def test_a_folder_that_others_can_use_is_not_used(run_store, puts, tmp_path, how):
    folder = node_folder(run_store, KEY)
    match how:
        case "open to others":
            folder.mkdir(parents=True)
            folder.parent.chmod(0o777)
        case "a link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            folder.parent.symlink_to(tmp_path / "elsewhere")
        case "a file":
            folder.parent.write_text("")
    ranks = [NodeLog(run_store, KEY, generation=0, rank=rank) for rank in range(2)]
    for rank, log in enumerate(ranks):
        log.append(line(rank, 0))
        log.flush()
    assert written_lines(run_store) == [(0, 0), (1, 0)]
    assert len(set(puts)) == 2  # each rank writes its own object
    assert not list(tmp_path.rglob("*-*.jsonl"))


def test_only_this_user_can_use_the_folder(run_store):
    NodeLog(run_store, KEY, generation=0, rank=0).flush()
    folder = node_folder(run_store, KEY)
    for path in (folder, folder.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert str(os.getuid()) in folder.parent.name


def test_lines_of_a_deleted_run_of_the_same_name_are_not_taken(run_store):
    old, new = (NodeLog(run_store, KEY, generation=0, rank=rank) for rank in range(2))
    old.append(line(0, 0))
    old.flush_soon()
    new.append(line(1, 1))
    new.flush_soon()
    (left,) = (path for path, _, _ in old._handed)
    os.utime(left, (time.time() - 9000, time.time() - 9000))
    run_store.write_json("run.json", {"started": time.time() - 60})
    new.flush()
    assert written_lines(run_store) == [(1, 1)]
    assert not list(node_folder(run_store, KEY).glob("*.jsonl"))


def test_the_parts_of_all_ranks_sum_to_their_lifetimes(run_store):
    began = time.time() - 100
    timelines = [Timeline(ledger(run_store, Runtime(rank=rank, world_size=4, node="n")), Runtime(rank=rank, node="n"),
                          began) for rank in range(4)]
    for category in ("restart", "productive", "save_stall", "productive"):
        for timeline in timelines:
            time.sleep(0.002)
            timeline.spent(category)
            timeline.flush()
    for timeline in timelines:
        timeline.finish()
        timeline.close()
    records = jsonlog.read(run_store, KEY)
    for rank, timeline in enumerate(timelines):  # each rank's intervals cover its time without gaps
        of_rank = sorted((record for record in records if record["rank"] == rank), key=lambda record: record["start"])
        assert [record["start"] for record in of_rank] == [began, *(record["end"] for record in of_rank[:-1])]
        assert of_rank[-1]["end"] == timeline._mark
    summary = summarise(records, [])
    assert sum(summary.parts.values()) == pytest.approx(summary.worker_seconds, abs=1e-6)
    assert summary.worker_seconds == pytest.approx(4 * summary.wall_seconds)
    assert isinstance(ledger(run_store, Runtime()), NodeLog)
