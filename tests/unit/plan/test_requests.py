"""The plan's requests a day are bounds of what the code does, counted where it does it."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.checkpoint.helpers import manager
from tidewheel import jsonlog, storage
from tidewheel.cli import run_command
from tidewheel.cluster.s3_server import S3Server
from tidewheel.config import load
from tidewheel.jsonlog import JsonLog
from tidewheel.plan.hardware import ClusterConfig
from tidewheel.plan.layout import Job
from tidewheel.plan.requests import DAY, Requests, requests, save_requests
from tidewheel.storage import LocalStore
from tidewheel.stores.objects import streams
from tidewheel.stores.s3 import S3Store
from tidewheel.train import history, node_log
from tidewheel.train.config import TrainConfig
from tidewheel.train.history import HistoryWriter, RunHistory
from tidewheel.train.node_log import NodeLog

HOUR = 3600
JOB = Job(load(TrainConfig, "jobs/configs/llama_1b.yaml"), 128_256, 4096)


def planned(**changed: float) -> dict[str, int]:
    given = {"step_seconds": 1.0, "checkpoint_bytes": 1e9, "interval_seconds": 600.0, **changed}
    return {item.what: item.a_day for item in requests(JOB, ClusterConfig(gpus=64), **given)}


class Objects(LocalStore):
    """A folder that is used as an object store is, and counts what is put."""

    puts = 0

    def local_path(self, key: str) -> None:
        return None

    def write(self, key: str, data: bytes) -> storage.Stamp:
        self.puts += 1
        return super().write(key, data)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Monotonic seconds of the logs."""
    now = [0.0]
    clocks = SimpleNamespace(monotonic=lambda: now[0], time=time.time, sleep=time.sleep)
    for module in (jsonlog, node_log):
        monkeypatch.setattr(module, "time", clocks)
    return now


def written(log: JsonLog | NodeLog) -> None:
    """Wait for what the log has begun to write."""
    if log._thread is not None:
        log._thread.join()


def test_an_hour_of_a_log(tmp_path: Path, clock: list[float]):
    folder_store = Objects(tmp_path)
    log = JsonLog(folder_store, "metrics.jsonl")
    for tenth in range(10 * HOUR):
        clock[0] = tenth / 10
        log.append({"step": tenth})
        written(log)
    bound = planned(step_seconds=0.1)["metrics.jsonl"] / 24
    assert 0.9 * bound < folder_store.puts <= bound + 1


def test_twenty_minutes_of_a_nodes_ledger(tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch):
    run_store = Objects(tmp_path / "run")
    monkeypatch.setattr(node_log.tempfile, "gettempdir", lambda: str(tmp_path))
    ranks = [NodeLog(run_store, "ledger.jsonl", generation=0, rank=rank) for rank in range(8)]
    for turn in range(HOUR // 3 // 2):
        clock[0] = 2.0 * turn
        for rank, log in enumerate(ranks):
            log.append({"rank": rank, "turn": turn, "end": 0.0})
            log.flush_soon()
            written(log)
    bound = planned()["ledger.jsonl"] / (64 / 8) / 24 / 3  # of a node
    assert 0.9 * bound < run_store.puts <= bound + 1


def test_the_state_is_put_no_more_often_than_planned(tmp_path: Path):
    place, waits = Objects(tmp_path), []
    writer = HistoryWriter(place, lambda: RunHistory(step=len(waits)))

    class Ended:
        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            return len(waits) > 20

        def set(self) -> None:
            return

    writer._ended = Ended()  # type: ignore[assignment]
    writer._run()
    assert place.puts == len(waits)
    assert planned()["state.json"] == DAY / waits[0]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests to the bucket "saves"; other threads of this process may be using stores of their own."""
    requests: list[str] = []
    ask = S3Store.ask

    def counted(store: S3Store, operation: str, *arguments: Any, **options: Any) -> Any:
        if store.bucket == "saves":
            requests.append(f"{operation} {[argument for argument in arguments if isinstance(argument, str)]}")
        return ask(store, operation, *arguments, **options)

    monkeypatch.setattr(S3Store, "ask", counted)
    return requests


@pytest.mark.parametrize("megabytes", [0.1, 13])
def test_a_save(megabytes: float, sent: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "PART_BYTES", 5 << 20)
    with S3Server() as server:
        bucket_store = storage.store(server.create_bucket("saves") + "/run/checkpoints")
        values = {"model": {"weight": torch.zeros(int(megabytes * 250_000))}, "optimizer": {}}
        saver = manager(bucket_store, asynchronous=False, keep_last=2)
        requests_by_save = []
        for step in range(1, 8):
            sent.clear()
            saver.save(step, values, {"step": step, "position": step, "identity": {}})
            saver.wait()
            requests_by_save.append(list(sent))
    bound = save_requests(1, megabytes * 1e6, kept=2)
    most = max(requests_by_save, key=len)
    assert 0.4 * bound < len(most) <= bound, most


@pytest.mark.parametrize(("module", "name", "what"), [
    (jsonlog, "FLUSH_SECONDS", "events.jsonl"), (node_log, "SECONDS", "ledger.jsonl"),
    (history, "STATE_SECONDS", "state.json")])
def test_the_plan_goes_by_the_codes_own_constants(module, name: str, what: str, monkeypatch: pytest.MonkeyPatch):
    before = planned()[what]
    monkeypatch.setattr(module, name, getattr(module, name) / 2)
    assert planned()[what] == 2 * before


def test_slow_steps_and_few_saves_make_fewer():
    slow = planned(step_seconds=30.0)
    assert slow["metrics.jsonl"] == slow["batches.jsonl"] == DAY / 30
    assert planned(interval_seconds=1200.0)["checkpoints"] == planned()["checkpoints"] / 2
    alone = {item.what: item.a_day for item in requests(JOB, ClusterConfig(gpus=4), 1.0, 1e9, 600.0)}
    assert alone["ledger.jsonl"] == DAY / node_log.SECONDS
    assert all(isinstance(item, Requests) and item.how for item in requests(JOB, ClusterConfig(gpus=4), 1, 1e9, 600))


def test_the_command_shows_them(capsys: pytest.CaptureFixture[str]):
    assert run_command(["plan", "jobs/configs/llama_1b.yaml", "--gpus", "4", "--sequence-length", "4096",
                        "--vocabulary-size", "128256"]) == 0
    shown = capsys.readouterr().out
    assert "requests to storage" in shown
    assert f"{round(DAY / node_log.SECONDS):,}" in shown
