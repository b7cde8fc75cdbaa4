from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import resource
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tidewheel import jsonlog
from tidewheel.cluster.s3_server import S3Server
from tidewheel.errors import StorageError
from tidewheel.jsonlog import JsonLog
from tidewheel.storage import Store, store


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        running.create_bucket("logs")
        yield running


@pytest.fixture(params=["local", "s3"])
def run_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return store(tmp_path / "run")
    request.getfixturevalue("server")
    return store(f"s3://logs/{uuid.uuid4().hex}")


def test_lines_come_back_in_order_across_restarts(run_store: Store) -> None:
    assert jsonlog.read(run_store, "metrics.jsonl") == []
    for generation in range(3):
        log = JsonLog(run_store, "metrics.jsonl", flush_seconds=0)
        for step in range(5):
            log.append({"generation": generation, "step": step, "text": "line\nbreak ü {"})
        log.flush()
        log.flush()  # there are no pending lines: writes nothing
    records = jsonlog.read(run_store, "metrics.jsonl")
    assert [(r["generation"], r["step"]) for r in records] == [(g, s) for g in range(3) for s in range(5)]
    assert records[0]["text"] == "line\nbreak ü {"


def test_lines_are_collected_on_an_object_store(server: S3Server) -> None:
    run_store = store(f"s3://logs/{uuid.uuid4().hex}")
    log = JsonLog(run_store, "m.jsonl", flush_seconds=3600)
    for step in range(100):
        log.append({"step": step})
    assert list(run_store.list()) == []
    log.flush()
    assert len(run_store.list("m.jsonl")) == 1
    assert [r["step"] for r in jsonlog.read(run_store, "m.jsonl")] == list(range(100))


def test_a_flush_puts_the_newest_segment_again(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonlog, "SEGMENT_BYTES", 10 * len('{"step":10}\n'))
    run_store = store(f"s3://logs/{uuid.uuid4().hex}")
    log = JsonLog(run_store, "m.jsonl", flush_seconds=3600)
    counts = []
    for step in range(10, 55):
        log.append({"step": step})
        log.flush()
        counts.append(len(run_store.list("m.jsonl")))
    assert counts == [1 + flushes // 10 for flushes in range(45)]
    for step in range(55, 100):  # more lines than fit in a segment
        log.append({"step": step})
    log.flush()
    assert len(run_store.list("m.jsonl")) == 9
    assert [r["step"] for r in jsonlog.read(run_store, "m.jsonl")] == list(range(10, 100))


def test_writers_sort_by_their_order_and_start_and_not_by_clocks(server: S3Server,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    run_store = store(f"s3://logs/{uuid.uuid4().hex}")
    clock = itertools.count(1_000_000, -1000)
    monkeypatch.setattr(jsonlog.time, "time", lambda: next(clock))
    monkeypatch.setattr(jsonlog.time, "time_ns", lambda: next(clock))
    numbers = itertools.count()
    for order in (2, 1, 2, 1_000_000, 2):
        log = JsonLog(run_store, "m.jsonl", order=order)
        for _ in range(2):
            log.append({"order": order, "number": next(numbers)})
            log.flush()
    pairs = [(r["order"], r["number"]) for r in jsonlog.read(run_store, "m.jsonl")]
    assert pairs == [(1, 2), (1, 3), (2, 0), (2, 1), (2, 4), (2, 5), (2, 8), (2, 9), (1_000_000, 6), (1_000_000, 7)]


def test_a_log_of_an_older_version_is_continued(server: S3Server) -> None:
    run_store = store(f"s3://logs/{uuid.uuid4().hex}")
    for part in range(3):
        content = f'{{"step":{2 * part}}}\n{{"step":{2 * part + 1}}}\n'
        run_store.write(f"m.jsonl/{1_790_000_000_000_000_000 + part:020d}-0123abcd-{part:06d}.jsonl", content.encode())
    log = JsonLog(run_store, "m.jsonl")
    log.append({"step": 6})
    log.flush()
    assert [r["step"] for r in jsonlog.read(run_store, "m.jsonl")] == list(range(7))
    assert [r["step"] for r in jsonlog.newest_first(run_store, "m.jsonl")] == list(range(6, -1, -1))


def test_a_put_that_arrives_late_loses_no_lines(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sender received an error, and has put more lines since."""
    run_store = store(f"s3://logs/{uuid.uuid4().hex}")
    log = JsonLog(run_store, "m.jsonl", flush_seconds=3600)
    late: list[tuple[str, bytes]] = []

    def lose(_: Store, key: str, data: bytes) -> None:
        late.append((key, data))
        raise StorageError("no answer")

    for step in range(6):
        log.append({"step": step})
        if step in (1, 4):
            with monkeypatch.context() as broken:
                broken.setattr(type(run_store), "write", lose)
                with pytest.raises(StorageError):
                    log.flush()
        else:
            log.flush()
    assert len(late) == 2
    for key, data in late:
        run_store.write(key, data)
    assert [r["step"] for r in jsonlog.read(run_store, "m.jsonl")] == list(range(6))


def test_the_newest_records_take_one_request(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonlog, "SEGMENT_BYTES", 100)
    run_store = store(f"s3://logs/{uuid.uuid4().hex}")
    log = JsonLog(run_store, "m.jsonl", flush_seconds=3600)
    for step in range(300):
        log.append({"step": step})
    log.flush()
    assert len(run_store.list("m.jsonl")) > 20
    reads = []
    real = type(run_store).read
    monkeypatch.setattr(type(run_store), "read", lambda *arguments: reads.append(arguments[1]) or real(*arguments))
    records = jsonlog.newest_first(run_store, "m.jsonl")
    assert next(records)["step"] == 299
    assert len(reads) == 1
    assert [r["step"] for r in records] == list(range(298, -1, -1))
    assert len(reads) == len(set(reads)) == len(run_store.list("m.jsonl"))


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
def test_a_file_is_read_backwards(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonlog, "_BLOCK_BYTES", block)
    run_store = store(tmp_path)
    assert list(jsonlog.newest_first(run_store, "m.jsonl")) == []
    log = JsonLog(run_store, "m.jsonl")
    for step in range(50):
        log.append({"step": step, "text": "ü" * (step % 11)})
    with (tmp_path / "m.jsonl").open("ab") as sink:
        sink.write(b'{"step":50')  # torn
    assert list(jsonlog.newest_first(run_store, "m.jsonl")) == jsonlog.read(run_store, "m.jsonl")[::-1]


@pytest.mark.parametrize("key", ["events.jsonl", "m.jsonl"])
def test_pending_lines_are_bounded_and_the_log_counts_the_dropped_ones(run_store: Store, key: str, tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonlog, "MAX_PENDING_BYTES", 50 * len('{"step":100}\n'))
    log = JsonLog(run_store, key, flush_seconds=3600)
    with monkeypatch.context() as broken:
        broken.setattr(type(run_store), "write", lambda *_: (_ for _ in ()).throw(StorageError("down")))
        broken.setattr(jsonlog._File, "write", lambda *_: (_ for _ in ()).throw(StorageError("full")))
        for step in range(100, 1000):
            log.append({"step": step})
        assert len(log.unwritten()) == 50 + (run_store.local_path(key) is not None)  # keeps lines that are being sent
        with pytest.raises(StorageError):
            log.flush()
    log.flush()
    records = jsonlog.read(run_store, key)
    steps = [r["step"] for r in records if "step" in r]
    assert steps[-50:] == list(range(950, 1000))
    notes = [r for r in records if r.get("kind") == "log_dropped"]
    assert len(notes) == (key == "events.jsonl")  # only events.jsonl gets the note
    for note in notes:
        assert note["detail"] == {"log": key, "lines": 900 - len(steps)}
    assert list(jsonlog.newest_first(run_store, key)) == records[::-1]


def unwritable(path: Path, fault: str) -> None:
    match fault:
        case "full":
            path.symlink_to("/dev/full")
        case "gone":
            shutil.rmtree(path.parent)
        case "no folder":
            shutil.rmtree(path.parent)
            path.parent.write_text("")
        case "a folder":
            path.mkdir()


def writable(path: Path, fault: str) -> None:
    match fault:
        case "full":
            path.unlink()
        case "gone":
            path.parent.mkdir()
        case "no folder":
            path.parent.unlink()
            path.parent.mkdir()
        case "a folder":
            path.rmdir()


@pytest.mark.parametrize(("fault", "written"), [("full", True), ("full", False), ("no folder", True),
                                                ("no folder", False), ("a folder", True), ("a folder", False),
                                                ("gone", True)])
def test_a_local_log_that_cannot_be_written_waits(tmp_path: Path, fault: str, written: bool,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonlog, "RETRY_SECONDS", 0.0)
    path = tmp_path / "run" / "events.jsonl"
    path.parent.mkdir()
    log = JsonLog(store(path.parent), path.name)
    before = b""
    if written:
        log.append({"step": 0})
        before = path.read_bytes()
        path.unlink()
    unwritable(path, fault)
    for step in range(1, 4):
        log.append({"step": step})
    log.flush_soon()
    assert len(log.unwritten()) == 3
    with pytest.raises(StorageError) as error:
        log.flush()
    assert error.value.fix
    writable(path, fault)
    path.write_bytes(before)
    log.append({"step": 4})
    assert log.unwritten() == []
    steps = [r["step"] for r in jsonlog.read(store(path.parent), path.name)]
    assert steps == [0, 1, 2, 3, 4] if written else [1, 2, 3, 4]


def test_a_folder_that_disappeared_is_not_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be on a disk that is mounted again later and would then hide what was written meanwhile."""
    monkeypatch.setattr(jsonlog, "RETRY_SECONDS", 0.0)
    log = JsonLog(store(tmp_path / "run"), "m.jsonl")
    log.append({"step": 0})
    (tmp_path / "run").rename(tmp_path / "away")
    log.append({"step": 1})
    assert not (tmp_path / "run").exists()
    (tmp_path / "away").rename(tmp_path / "run")
    log.flush_soon()
    assert [r["step"] for r in jsonlog.read(store(tmp_path / "run"), "m.jsonl")] == [0, 1]


def _fill_the_disk(root: str) -> None:
    """Let the first line fit and the second one only in part, then make room again."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    log = JsonLog(store(root), "m.jsonl")
    line = len('{"step":0}\n')
    resource.setrlimit(resource.RLIMIT_FSIZE, (line + line // 2, resource.RLIM_INFINITY))
    for step in range(3):
        log.append({"step": step})
    if len(log.unwritten()) != 2 or (Path(root) / "m.jsonl").stat().st_size != line + line // 2:
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    log.flush()


def test_a_disk_that_fills_up_in_the_middle_of_a_line_loses_no_line(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=_fill_the_disk, args=(str(tmp_path),))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert [r["step"] for r in jsonlog.read(store(tmp_path), "m.jsonl")] == [0, 1, 2]


def test_a_burst_is_one_write(server: S3Server) -> None:
    """`flush_due` waits for the interval, however often it is called."""
    run_store = store(f"s3://logs/{uuid.uuid4().hex}")
    log = JsonLog(run_store, "m.jsonl", flush_seconds=3600)
    for step in range(10):
        log.append({"step": step})
        log.flush_due()
    assert list(run_store.list()) == []
    log = JsonLog(run_store, "m.jsonl", flush_seconds=0)
    log.append({"step": 10})
    until = time.monotonic() + 60
    while log.unwritten() and time.monotonic() < until:
        time.sleep(0.01)
    assert [r["step"] for r in jsonlog.read(run_store, "m.jsonl")] == [10]


def test_lines_are_kept_while_the_object_store_fails(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    run_store = store(f"s3://logs/{uuid.uuid4().hex}")
    log = JsonLog(run_store, "m.jsonl", flush_seconds=3600)
    log.append({"step": 1})
    with monkeypatch.context() as broken:
        broken.setattr(type(run_store), "write", lambda *_: (_ for _ in ()).throw(StorageError("down")))
        with pytest.raises(StorageError):
            log.flush()
    log.append({"step": 2})
    log.flush()
    assert [r["step"] for r in jsonlog.read(run_store, "m.jsonl")] == [1, 2]


def test_threads_and_writers_share_a_log(run_store: Store) -> None:
    logs = [JsonLog(run_store, "events.jsonl", flush_seconds=0.05) for _ in range(3)]

    def work(writer: int) -> None:
        for count in range(40):
            logs[writer % 3].append({"writer": writer, "count": count, "filler": "x" * 500})

    threads = [threading.Thread(target=work, args=(writer,)) for writer in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in logs:
        log.flush()
    records = jsonlog.read(run_store, "events.jsonl")
    assert sorted((r["writer"], r["count"]) for r in records) == [(w, c) for w in range(6) for c in range(40)]
    for writer in range(6):  # each writer's own lines stay in order
        assert [r["count"] for r in records if r["writer"] == writer] == list(range(40))


def _append_many(root: str, writer: int) -> None:
    log = JsonLog(store(root), "m.jsonl")
    for count in range(300):
        log.append({"writer": writer, "count": count, "filler": "y" * 3000})


def test_processes_append_to_one_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_append_many, args=(str(tmp_path), writer)) for writer in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    records = jsonlog.read(store(tmp_path), "m.jsonl")
    assert sorted((r["writer"], r["count"]) for r in records) == [(w, c) for w in range(4) for c in range(300)]


WHOLE = json.dumps({"step": 1, "detail": {"text": "a \u00fc }", "list": [1, 2.5, True]}}).encode()


@pytest.mark.parametrize("cut", range(1, len(WHOLE)))
def test_a_line_torn_anywhere_costs_only_itself(tmp_path: Path, cut: int) -> None:
    (tmp_path / "m.jsonl").write_bytes(b'{"step":0}\n' + WHOLE[:cut])
    assert [r["step"] for r in jsonlog.read(store(tmp_path), "m.jsonl")] == [0]
    JsonLog(store(tmp_path), "m.jsonl").append({"step": 2})
    assert [r["step"] for r in jsonlog.read(store(tmp_path), "m.jsonl")] == [0, 2]


def test_zeros_after_a_power_cut_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_bytes(b'{"step":0}\n' + bytes(100) + b"\n" + b'{"step":1}\n')
    assert [r["step"] for r in jsonlog.read(store(tmp_path), "m.jsonl")] == [0, 1]


def test_numbers_of_numpy_stay_numbers(run_store: Store) -> None:
    log = JsonLog(run_store, "m.jsonl")
    log.append({"a": np.int64(3), "b": np.float32(0.5), "c": np.array(7), "path": Path("x"), "nan": float("nan")})
    log.flush()
    record = jsonlog.read(run_store, "m.jsonl")[0]
    assert (record["a"], record["b"], record["c"], record["path"]) == (3, 0.5, 7, "x")
    assert record["nan"] != record["nan"]


def test_lines_of_a_writer_that_is_gone_are_appended_and_read_once(run_store: Store) -> None:
    first, second = JsonLog(run_store, "m.jsonl", flush_seconds=3600), JsonLog(run_store, "m.jsonl")
    first.append({"step": 1})
    first.flush()
    first.append({"step": 2})
    unwritten = first.unwritten()
    assert unwritten == ([] if run_store.local_path("m.jsonl") is not None else ['{"step":2}\n'])
    first.flush()  # the first writer writes them after all
    assert first.unwritten() == []
    second.restore(unwritten)
    second.append({"step": 3})
    second.flush()
    assert [line["step"] for line in jsonlog.read(run_store, "m.jsonl")] == [1, 2, 3]


def test_the_thread_of_the_last_lines_ends_as_soon_as_they_are_written(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    run_store, failures = store(tmp_path / "log"), [StorageError("away", where="log", fix="wait")]
    log = JsonLog(run_store, "m.jsonl")
    write = log._sink.write

    def fails_once(lines: list[bytes]) -> None:
        if failures:
            raise failures.pop()
        write(lines)

    monkeypatch.setattr(log._sink, "write", fails_once)
    monkeypatch.setattr(jsonlog, "FLUSH_SECONDS", 600.0)
    monkeypatch.setattr(jsonlog, "RETRY_SECONDS", 600.0)
    log.append({"step": 1})
    failures.append(StorageError("away", where="log", fix="wait"))
    log.close()
    for thread in threading.enumerate():
        if thread.name == "end of log m.jsonl":
            thread.join(60)
            assert not thread.is_alive()
    assert jsonlog.read(run_store, "m.jsonl") == [{"step": 1}]
