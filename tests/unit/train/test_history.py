"""Tests of the run's history that a start reads."""

import json
import time
from dataclasses import asdict, replace

import pytest

from tidewheel import jsonlog
from tidewheel.errors import StorageError
from tidewheel.jsonlog import JsonLog
from tidewheel.storage import LocalStore, store
from tidewheel.train import history
from tidewheel.train.history import HistoryWriter, RunHistory, last_step, read_history
from tidewheel.train.record import RunRecord


def batches(run_store, *steps: int, generation: int = 0) -> None:
    log = JsonLog(run_store, "batches.jsonl", order=generation)
    for step in steps:
        log.append({"step": step, "generation": generation})


def event(run_store, at: float, kind: str, **detail) -> None:
    JsonLog(run_store, "events.jsonl").append({"time": at, "kind": kind, "detail": detail})


def test_a_run_without_a_state_is_read_from_its_logs(tmp_path):
    run_store = store(tmp_path)
    assert read_history(run_store) == RunHistory()
    batches(run_store, *range(1, 101))
    batches(run_store, *range(91, 96), generation=1)
    event(run_store, 1.0, "failure", generation=0)
    event(run_store, 2.0, "resume", generation=1)
    event(run_store, 3.0, "node_lost", node="n")
    assert read_history(run_store) == RunHistory(step=100, failures=1, generation=1)
    assert last_step(run_store) == 100


def test_the_logs_add_to_the_state(tmp_path):
    run_store = store(tmp_path)
    batches(run_store, *range(1, 20))
    for at in (10.0, 20.0, 30.0):
        event(run_store, at, "failure", generation=3)
    run_store.write_json("state.json", asdict(RunHistory(step=15, failures=7, generation=2, time=25.0)))
    assert read_history(run_store) == RunHistory(step=19, failures=8, generation=3, time=25.0)
    run_store.write_json("state.json", asdict(RunHistory(step=500, failures=7, generation=9, time=40.0)))
    assert read_history(run_store) == RunHistory(step=500, failures=7, generation=9, time=40.0)
    assert last_step(run_store, known=500) == 500


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"step": "x", "failures": 0, "generation": 0, "time": 0}'])
def test_a_damaged_state_is_ignored(tmp_path, content):
    (tmp_path / "state.json").write_text(content)
    batches(store(tmp_path), 1, 2)
    assert read_history(store(tmp_path)) == RunHistory(step=2, generation=0)


def test_reading_stops_at_the_known_step(tmp_path, monkeypatch):
    run_store = store(tmp_path)
    batches(run_store, *range(1, 5000))
    event(run_store, 1.0, "failure", generation=0)
    for at in range(10_000, 10_500):
        event(run_store, float(at), "save")
    run_store.write_json("state.json", asdict(RunHistory(step=4_990, failures=1, generation=0, time=10_490.0)))
    read = []

    def counted(*arguments):
        for record in jsonlog.newest_first(*arguments):
            read.append(record)
            yield record

    monkeypatch.setattr(history, "newest_first", counted)
    monkeypatch.setattr(history, "CLOCKS_SECONDS", 20.0)
    assert read_history(run_store) == RunHistory(step=4_999, failures=1, generation=0, time=10_490.0)
    assert len(read) == 10 + 31


def test_the_writer_writes_changes_and_waits_for_storage(tmp_path):
    class Away(LocalStore):
        away, writes = False, 0

        def writer(self, key):
            self.writes += 1
            if self.away:
                raise StorageError("away", where=key, fix="wait")
            return super().writer(key)

    def until(condition):
        limit = time.monotonic() + 60
        while not condition() and time.monotonic() < limit:
            time.sleep(0.01)
        assert condition()

    run_store, now = Away(tmp_path), RunHistory(step=1, generation=0)
    asked = []
    writer = HistoryWriter(run_store, lambda: asked.append(1) or replace(now, time=time.time()), seconds=0.01)
    writer.start()
    until(lambda: len(asked) > 5)
    assert run_store.writes == 1
    assert read_history(run_store).step == 1
    run_store.away, now = True, replace(now, step=2)
    until(lambda: run_store.writes > 3)
    run_store.away = False
    until(lambda: read_history(run_store).step == 2)
    now = replace(now, step=3)
    writer.end()
    assert json.loads((tmp_path / "state.json").read_text())["step"] == 3


def test_an_evaluation_is_found_from_the_end(tmp_path):
    record = RunRecord(store(tmp_path))
    for step in range(1, 11):
        record.metrics.append({"step": step, "loss": None if step == 4 else 1.0})
        if step in (4, 8):
            record.metrics.append({"step": step, "validation_loss": 2.0})
    assert [step for step in range(1, 11) if record.evaluated(step)] == [4, 8]
    record.metrics.append({"step": 4, "loss": 1.0})  # the run resumed from step 3
    assert not record.evaluated(4)
    record.metrics.append({"step": 2, "validation_loss": 2.0})  # written late by a separate evaluator
    record.metrics.append({"step": 4, "validation_loss": 2.0})
    assert record.evaluated(4)
