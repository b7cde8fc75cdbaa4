"""Tests of storage that misbehaves during a run: training continues, reports the cause and loses nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.train.helpers import config, write_shards
from tidewheel import jsonlog, retry, storage
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.verify import list_checkpoints, verify_checkpoint
from tidewheel.cluster.s3_faults import Faults
from tidewheel.cluster.s3_server import S3Server
from tidewheel.elastic.trainer import LocalControl
from tidewheel.jsonlog import JsonLog
from tidewheel.retry import RetryPolicy
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.runtime import Runtime

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STEPS, BREAKS_AT = 30, 8


class Training(LocalControl):
    """A control that breaks the storage at a step and fixes it after a failed save."""

    def __init__(self, log: JsonLog, break_it: Callable[[], object], fix_it: Callable[[], object]) -> None:
        super().__init__(log, None)
        self.break_it, self.fix_it = break_it, fix_it
        self.step, self.failed_at = 0, 0
        self.reasons: list[str] = []

    def progress(self, step: int, steps: int, **metrics) -> None:
        self.step = step
        if step == BREAKS_AT:
            self.break_it()

    def event(self, kind: str, **detail) -> None:
        super().event(kind, **detail)
        if kind == "save_failed":
            self.reasons.append(detail["reason"])
            self.failed_at = self.failed_at or self.step
            self.fix_it()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("misbehaves")
    write_shards(base / "shards")
    return base


def settings_of(shards: Path, uri: str) -> TrainConfig:
    return config(shards, f"run{time.time_ns()}", f"steps={STEPS}", "evaluation.every_steps=0", f"run.uri={uri}",
                  "evaluation.sample_tokens=0", "data.validation=''", "checkpoint.every_steps=10",
                  "checkpoint.keep_last=9", "checkpoint.retry_seconds=0.2")


def trained(settings: TrainConfig, break_it: Callable[[], object], fix_it: Callable[[], object]) -> Training:
    """Train through the fault, and check that the run's files are complete."""
    run = storage.store(settings.run_uri)
    log = JsonLog(run, "events.jsonl")
    control = Training(log, break_it, fix_it)
    saver = CheckpointManager.of(run.child("checkpoints"), settings.checkpoint,
                                 lambda kind, detail: control.event(kind, **detail), generation=None)
    result = train(settings, Runtime(checkpoints=saver, control=control))
    log.flush()
    assert result.steps == STEPS
    assert control.reasons
    whole = [info for info in list_checkpoints(saver.store) if info.complete]
    assert whole[-1].step == STEPS
    assert verify_checkpoint(saver.store, whole[-1].name) == []
    assert len(whole) >= 2  # at least one save between the fault and the end
    for name in ("batches.jsonl", "metrics.jsonl"):
        steps = {line["step"] for line in jsonlog.read(run, name)}
        assert steps >= set(range(1, STEPS + 1)), name
    kinds = [event["kind"] for event in jsonlog.read(run, "events.jsonl")]
    assert "save_failed" in kinds
    assert kinds[-1] == "finish"
    return control


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server(faults=Faults(0.0)) as running:
        yield running


@pytest.mark.parametrize(("faults", "message"), [
    (Faults(1.0, 0, ("silent",)), "takes requests but does not answer in time"),
    (Faults(1.0, 0, ("trickle",)), "takes requests but does not answer in time"),
    (Faults(1.0, 0, ("slow_down",)), "SlowDown"),
    (Faults(1.0, 0, ("reset_before", "reset_after")), "the object store failed"),
    (Faults(0.0, expired_key="tidewheel"), "the credentials have expired"),
], ids=["silent", "trickle", "503", "reset", "expired"])
def test_training_outlasts_a_misbehaving_object_store(faults: Faults, message: str, server: S3Server, shards: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 0.7 if "in time" in message else 60.0  # a busy machine must not look like a silent store
    monkeypatch.setattr(retry, "POLICY", RetryPolicy(request_seconds=seconds, budget_seconds=2.0))
    bucket = server.create_bucket(f"run{time.time_ns()}")

    def fix_it() -> None:
        if faults.expired_key:
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")  # the store refuses the old key from now on
        else:
            server.fail(Faults(0.0))

    try:
        control = trained(settings_of(shards, bucket), lambda: server.fail(faults), fix_it)
    finally:
        server.fail(Faults(0.0))
    assert any(message in reason for reason in control.reasons), control.reasons


def test_training_outlasts_a_frozen_object_store(server: S3Server, shards: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel still accepts connections for the stopped process of the server."""
    monkeypatch.setattr(retry, "POLICY", RetryPolicy(request_seconds=0.7, budget_seconds=2.0))
    bucket, pid = server.create_bucket(f"run{time.time_ns()}"), server.pid
    assert pid is not None
    control = trained(settings_of(shards, bucket), lambda: os.kill(pid, signal.SIGSTOP),
                      lambda: os.kill(pid, signal.SIGCONT))
    assert "does not answer in time" in control.reasons[0]


# -- folders -------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small file system and yield its folder."""
    base = tmp_path / "disk"
    base.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(base)],
                                      check=False, capture_output=True).returncode:
        pytest.skip("mounting takes root")
    yield base
    subprocess.run(["umount", "-l", str(base)], check=True)


def test_training_outlasts_a_full_disk(disk: Path, shards: Path) -> None:
    ballast = disk / "ballast"

    def fill() -> None:
        with ballast.open("wb", buffering=0) as sink, contextlib.suppress(OSError):
            while True:
                sink.write(bytes(4096))

    control = trained(settings_of(shards, str(disk)), fill, lambda: ballast.unlink(missing_ok=True))
    assert "No space left on device" in control.reasons[0]


def test_training_outlasts_a_folder_that_turns_read_only(disk: Path, shards: Path) -> None:
    """The kernel makes a file system read-only when its disk reports errors."""
    def mount(*options: str) -> None:
        subprocess.run(["mount", *options], check=True)

    settings = settings_of(shards, str(disk))
    there: list[bool] = []

    def lock() -> None:
        mount("--bind", settings.run_uri, settings.run_uri)
        mount("-o", "remount,ro,bind", settings.run_uri)
        there.append(True)

    def unlock() -> None:
        if there:
            there.clear()
            subprocess.run(["umount", "-l", settings.run_uri], check=True)

    control = trained(settings, lock, unlock)
    assert "Read-only file system" in control.reasons[0]


def test_training_outlasts_a_folder_that_disappears_and_returns(tmp_path: Path, shards: Path) -> None:
    """An earlier save, whether done or not, has identified the folder, so no other folder in its place is used."""
    settings = settings_of(shards, str(tmp_path / "runs"))
    settings = settings.model_copy(update={"checkpoint": settings.checkpoint.model_copy(update={"every_steps": 5})})
    run, away = Path(settings.run_uri), tmp_path / "away"

    def come_back() -> None:
        if away.exists():
            assert not (run / "checkpoints").exists()  # nothing was written in place of the missing folder
            away.rename(run)

    def go_away() -> None:
        until = time.monotonic() + 60
        while not (run / "checkpoints").exists():  # on a busy machine the first save has not begun yet
            assert time.monotonic() < until
            time.sleep(0.01)
        run.rename(away)

    control = trained(settings, go_away, come_back)
    assert "the folder is gone" in control.reasons[0]
