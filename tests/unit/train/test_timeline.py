"""Tests that a worker's ledger has no gaps and stays short."""

import time
from pathlib import Path

from tidewheel import jsonlog, storage
from tidewheel.jsonlog import JsonLog
from tidewheel.train.runtime import Runtime
from tidewheel.train.timeline import Timeline


def test_intervals_join_and_equal_ones_become_one(tmp_path: Path):
    run_store, began = storage.store(tmp_path), time.time() - 5
    timeline = Timeline(JsonLog(run_store, "ledger.jsonl"), Runtime(rank=1, generation=2, node="n"), began, 1e9)
    timeline.spent("restart")
    for _ in range(3):
        timeline.spent("data_wait")  # far below a millisecond: gets no line
        time.sleep(0.005)
        timeline.spent("productive")
    time.sleep(0.005)
    timeline.spent("idle")
    timeline.flush()
    lines = jsonlog.read(run_store, "ledger.jsonl")
    assert [line["category"] for line in lines] == ["restart", "productive", "idle"]
    assert lines[0]["start"] == began
    assert [line["end"] for line in lines[:-1]] == [line["start"] for line in lines[1:]]
    assert {(line["rank"], line["generation"], line["node"]) for line in lines} == {(1, 2, "n")}


def test_a_flush_leaves_no_gap(tmp_path: Path):
    run_store = storage.store(tmp_path)
    timeline = Timeline(JsonLog(run_store, "ledger.jsonl"), Runtime(), time.time(), flush_seconds=0)
    for category in ("productive", "productive", "save_stall"):
        time.sleep(0.002)
        timeline.spent(category)
    lines = jsonlog.read(run_store, "ledger.jsonl")
    assert len(lines) == 3
    assert [line["end"] for line in lines[:-1]] == [line["start"] for line in lines[1:]]
