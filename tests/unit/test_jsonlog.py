from __future__ import annotations

import json
import multiprocessing
import threading
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
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return store(tmp_path / "run")
    request.getfixturevalue("server")
    return store(f"s3://logs/{uuid.uuid4().hex}")


def test_lines_come_back_in_order_across_restarts(place: Store) -> None:
    assert jsonlog.read(place, "metrics.jsonl") == []
    for generation in range(3):
        log = JsonLog(place, "metrics.jsonl", flush_seconds=0)
        for step in range(5):
            log.append({"generation": generation, "step": step, "text": "line\nbreak ü {"})
        log.flush()
        log.flush()  # nothing collected: writes nothing
    records = jsonlog.read(place, "metrics.jsonl")
    assert [(r["generation"], r["step"]) for r in records] == [(g, s) for g in range(3) for s in range(5)]
    assert records[0]["text"] == "line\nbreak ü {"


def test_lines_are_collected_on_an_object_store(server: S3Server) -> None:
    place = store(f"s3://logs/{uuid.uuid4().hex}")
    log = JsonLog(place, "m.jsonl", flush_seconds=3600)
    for step in range(100):
        log.append({"step": step})
    assert list(place.list()) == []
    log.flush()
    assert len(place.list("m.jsonl")) == 1
    assert [r["step"] for r in jsonlog.read(place, "m.jsonl")] == list(range(100))


def test_lines_are_kept_while_the_object_store_fails(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    place = store(f"s3://logs/{uuid.uuid4().hex}")
    log = JsonLog(place, "m.jsonl", flush_seconds=3600)
    log.append({"step": 1})
    with monkeypatch.context() as broken:
        broken.setattr(type(place), "write", lambda *_: (_ for _ in ()).throw(StorageError("down")))
        with pytest.raises(StorageError):
            log.flush()
    log.append({"step": 2})
    log.flush()
    assert [r["step"] for r in jsonlog.read(place, "m.jsonl")] == [1, 2]


def test_threads_and_writers_share_a_log(place: Store) -> None:
    logs = [JsonLog(place, "events.jsonl", flush_seconds=0.05) for _ in range(3)]

    def work(number: int) -> None:
        for count in range(40):
            logs[number % 3].append({"writer": number, "count": count, "filler": "x" * 500})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in logs:
        log.flush()
    records = jsonlog.read(place, "events.jsonl")
    assert sorted((r["writer"], r["count"]) for r in records) == [(w, c) for w in range(6) for c in range(40)]
    for writer in range(6):  # each writer's own lines stay in its order
        assert [r["count"] for r in records if r["writer"] == writer] == list(range(40))


def _append_many(root: str, number: int) -> None:
    log = JsonLog(store(root), "m.jsonl")
    for count in range(300):
        log.append({"writer": number, "count": count, "filler": "y" * 3000})


def test_processes_append_to_one_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_append_many, args=(str(tmp_path), number)) for number in range(4)]
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


def test_numbers_of_numpy_stay_numbers(place: Store) -> None:
    log = JsonLog(place, "m.jsonl")
    log.append({"a": np.int64(3), "b": np.float32(0.5), "c": np.array(7), "path": Path("x"), "nan": float("nan")})
    log.flush()
    record = jsonlog.read(place, "m.jsonl")[0]
    assert (record["a"], record["b"], record["c"], record["path"]) == (3, 0.5, 7, "x")
    assert record["nan"] != record["nan"]


def test_lines_of_a_writer_that_is_gone_are_appended_and_read_once(place: Store) -> None:
    first, second = JsonLog(place, "m.jsonl", flush_seconds=3600), JsonLog(place, "m.jsonl")
    first.append({"step": 1})
    first.flush()
    first.append({"step": 2})
    unwritten = first.unwritten()
    assert unwritten == ([] if place.local_path("m.jsonl") is not None else ['{"step":2}\n'])
    first.flush()  # it came to write them after all
    assert first.unwritten() == []
    second.restore(unwritten)
    second.append({"step": 3})
    second.flush()
    assert [line["step"] for line in jsonlog.read(place, "m.jsonl")] == [1, 2, 3]
