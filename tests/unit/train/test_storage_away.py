"""Tests of unavailable storage: training continues, saves are retried, and a limit ends the run."""

import time
from pathlib import Path

import pytest

from tests.unit.train.helpers import config, write_shards
from tidewheel import jsonlog, retry, storage
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.verify import list_checkpoints
from tidewheel.cluster.s3_server import S3Server
from tidewheel.elastic.trainer import LocalControl
from tidewheel.errors import StorageAwayError, StorageError
from tidewheel.jsonlog import JsonLog
from tidewheel.storage import LocalStore
from tidewheel.train import checks, storage_wait
from tidewheel.train.loop import train
from tidewheel.train.record import RunRecord
from tidewheel.train.runtime import Runtime
from tidewheel.train.storage_wait import StorageWait


class AwayStore(LocalStore):
    """A folder that cannot be written to while `away` returns True."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.away = lambda: False

    def writer(self, key: str):
        if self.away():
            raise StorageError("the object store is away", where=key, fix="wait")
        return super().writer(key)


class Training(LocalControl):
    """A control that counts steps."""

    step = 0

    def progress(self, step: int, steps: int, **metrics) -> None:
        self.step = step
        time.sleep(0.02)


def run(folder: Path, away, *overrides: str) -> tuple[AwayStore, list[dict]]:
    settings = config(folder, f"run{time.time_ns()}", "steps=30", "evaluation.every_steps=0",
                      "evaluation.sample_tokens=0", "data.validation=''", "checkpoint.every_steps=10",
                      "checkpoint.keep_last=9", "checkpoint.retry_seconds=0.1", *overrides)
    target = AwayStore(Path(settings.run_uri) / "checkpoints")
    control = Training(JsonLog(storage.store(settings.run_uri), "events.jsonl"), None)
    target.away = lambda: away(control.step)
    manager = CheckpointManager(target, max_failed=settings.checkpoint.max_failed_saves,
                                keep_last=settings.checkpoint.keep_last,
                                on_event=lambda kind, detail: control.event(kind, **detail))
    try:
        train(settings, Runtime(checkpoints=manager, control=control))
    finally:
        target.away = lambda: False
        events = jsonlog.read(storage.store(settings.run_uri), "events.jsonl")
    return target, events


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("away")
    write_shards(base / "shards")
    return base


def test_training_continues_and_the_save_follows_later(folder: Path):
    target, events = run(folder, lambda step: 5 <= step < 14)
    kinds = [event["kind"] for event in events]
    assert kinds.count("save_failed") >= 1
    saved = [info.step for info in list_checkpoints(target) if info.complete]
    assert 10 not in saved
    assert any(14 <= step < 20 for step in saved)  # earlier than the schedule's next save
    assert saved[-1] == 30


def test_at_the_end_the_run_waits_for_storage(folder: Path):
    until = []

    def away(step: int) -> bool:
        if step >= 30:
            until.append(time.monotonic())
        return step >= 25 and len(until) < 3

    target, events = run(folder, away)
    assert [info.step for info in list_checkpoints(target) if info.complete][-1] == 30
    assert events[-1]["kind"] == "finish"


def test_a_limit_ends_the_run(folder: Path):
    with pytest.raises(StorageError, match=r"3 saves in a row have failed; the last one: .*away") as error:
        run(folder, lambda step: True, "checkpoint.max_failed_saves=3", "checkpoint.every_steps=2")
    assert "start the run again" in error.value.fix


def test_logs_do_not_block_training():
    """The object store accepts requests without answering, and answers later."""
    from tidewheel.cluster.faults import frozen

    with S3Server() as server:
        target = storage.store(server.create_bucket("logs") + "/run")
        log = JsonLog(target, "metrics.jsonl", flush_seconds=0.0)
        log.append({"step": 0})
        log.flush()
        assert server.pid is not None
        with frozen(server.pid):
            began = time.monotonic()
            for step in range(1, 200):
                log.append({"step": step})
            assert time.monotonic() - began < 15  # a request that blocked training would take twice as long
        log.flush()
        assert [line["step"] for line in jsonlog.read(target, "metrics.jsonl")] == list(range(200))


@pytest.mark.parametrize("generation", [0, 1])
def test_a_later_generation_waits_for_storage_to_come_back(folder: Path, generation: int, monkeypatch):
    """The first generation raises at once, since a wrong address is more likely than an outage."""
    settings = config(folder, f"back{generation}", "steps=2", "evaluation.every_steps=0", "evaluation.sample_tokens=0",
                      "data.validation=''")
    control = Training(JsonLog(storage.store(settings.run_uri), "events.jsonl"), None)
    monkeypatch.setattr(storage_wait, "PAUSE_SECONDS", 0.01)
    calls = {"read_data": 0, "last_step": 0}

    def flaky(name: str, real):
        def call(*arguments):
            calls[name] += 1
            if calls[name] <= 3:
                raise StorageAwayError("the object store does not answer", where="s3://bucket", fix="wait")
            return real(*arguments)
        return call

    monkeypatch.setattr(checks, "read_data", flaky("read_data", checks.read_data))
    monkeypatch.setattr(RunRecord, "last_step", flaky("last_step", RunRecord.last_step))
    if generation == 0:
        with pytest.raises(StorageAwayError):
            train(settings, Runtime(control=control))
        assert calls == {"read_data": 1, "last_step": 0}
        return
    assert train(settings, Runtime(control=control, generation=generation)).steps == 2
    assert calls == {"read_data": 4, "last_step": 4}
    events = jsonlog.read(storage.store(settings.run_uri), "events.jsonl")
    assert [event["kind"] for event in events].count("storage_away") == 2


def test_waiting_for_storage_ends_after_the_limit(monkeypatch):
    monkeypatch.setattr(storage_wait, "PAUSE_SECONDS", 0.01)
    events = []
    calls = []

    def away() -> None:
        calls.append(1)
        raise StorageAwayError("the object store does not answer", where="s3://bucket", fix="wait")

    with pytest.raises(StorageAwayError):
        StorageWait(0.5, lambda kind, **detail: events.append(kind))(away)
    assert len(calls) > 2
    assert events == ["storage_away"]


def test_requests_inside_a_wait_have_no_budgets_of_their_own(monkeypatch):
    """A failing request ends with the wait, which does not multiply its tries."""
    monkeypatch.setattr(storage_wait, "PAUSE_SECONDS", 0.01)
    quick = retry.RetryPolicy(budget_seconds=1e6, pause_seconds=0.1, longest_pause_seconds=0.1)
    monkeypatch.setattr(retry.JITTER, "random", lambda: 1.0)
    tries, events = [], []

    def request() -> None:
        tries.append(1)
        raise ConnectionResetError("reset")

    def read() -> None:
        try:
            retry.call(request, quick, may_help=lambda _: True)
        except ConnectionResetError as error:
            raise StorageAwayError(str(error), where="s3://bucket", fix="wait") from error

    with pytest.raises(StorageAwayError, match="reset"):
        StorageWait(0.5, lambda kind, **detail: events.append(kind))(read)
    assert len(tries) <= 1 + 0.5 / 0.1 + 1 + 0.1 / 0.01
