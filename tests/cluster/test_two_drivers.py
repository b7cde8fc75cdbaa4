"""Two drivers on one run: the second learns who owns the run, and a fenced driver commits nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.in_place import SMALL
from tests.unit.train.helpers import config, write_shards
from tidewheel import jsonlog
from tidewheel.checkpoint.verify import list_checkpoints, verify_checkpoint
from tidewheel.commit_log import CommitLog
from tidewheel.elastic.trainer import fit_local
from tidewheel.storage import Store, store
from tidewheel.train.audit import audit

pytestmark = pytest.mark.cluster

DRIVER = """
import sys, time
from pathlib import Path
from tests.cluster.in_place import slow_steps
from tests.unit.train.helpers import config
from tidewheel import ownership
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import OwnershipError
ownership.LOCAL = ownership.Timing(0.3, 10.0)
settings = config(Path(sys.argv[1]), "run", "checkpoint.every_steps=8", *sys.argv[3:])
slow_steps(settings, Path(sys.argv[1], "hurry"))
try:
    result = fit_local(settings, take_over=sys.argv[2] == "take")
    print("done", result.steps, flush=True)
except OwnershipError as error:
    print("refused:", error.what, flush=True)
    sys.exit(3)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(tmp_path / "shards", rows=200)
    write_shards(tmp_path / "validation", shards=1, rows=11, seed=1)
    return tmp_path


def drive(folder: Path, how: str = "", *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", DRIVER, str(folder), how, *SMALL, *overrides],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_checkpoints(run: Store, count: int) -> None:
    until = time.monotonic() + 600
    while True:
        head = CommitLog(run.child("checkpoints")).head()
        if head is not None and len(head.checkpoints) >= count:
            return
        assert time.monotonic() < until
        time.sleep(0.05)


def check(run: Store) -> None:
    audited = audit(run.uri)
    assert audited.ok, audited.summary()
    for info in list_checkpoints(run.child("checkpoints")):
        if info.committed:
            assert verify_checkpoint(run.child("checkpoints"), info.name) == []


def test_a_second_driver_is_refused_and_a_stopped_first_one_is_fenced_when_it_returns(folder):
    run = store(config(folder).run_uri)
    first = drive(folder)
    wait_for_checkpoints(run, 1)
    refused = drive(folder, "", "optimizer.learning_rate=3e-2")
    output, _ = refused.communicate(timeout=600)
    assert refused.returncode == 3, output
    assert f"the run is being trained by process {first.pid} on" in output
    assert first.poll() is None
    wait_for_checkpoints(run, 2)
    os.kill(first.pid, signal.SIGSTOP)
    before = CommitLog(run.child("checkpoints")).head()
    second = drive(folder)
    until = time.monotonic() + 600
    while CommitLog(run.child("checkpoints")).head().epoch == before.epoch:
        assert time.monotonic() < until
        assert second.poll() is None, second.communicate()
        time.sleep(0.1)
    os.kill(first.pid, signal.SIGCONT)
    output, _ = first.communicate(timeout=600)
    assert first.returncode == 3, output
    assert f"the run was taken over by process {second.pid} on" in output
    (folder / "hurry").touch()
    output, _ = second.communicate(timeout=600)
    assert "done 150" in output
    check(run)
    reference = fit_local(config(folder, "undisturbed", *SMALL, "checkpoint.every_steps=0"))
    losses = [line["loss"] for line in jsonlog.read(run, "metrics.jsonl") if line["step"] == 150 and "loss" in line]
    assert losses[-1] == pytest.approx(reference.loss, rel=1e-6)


@pytest.mark.long  # `tests/unit/test_ownership.py` takes a run over by force, and the test above fences its driver
def test_a_live_driver_is_fenced_on_request(folder):
    run = store(config(folder).run_uri)
    first = drive(folder)
    wait_for_checkpoints(run, 1)
    second = drive(folder, "take")
    output, _ = first.communicate(timeout=600)
    assert first.returncode == 3, output
    (folder / "hurry").touch()
    output, _ = second.communicate(timeout=600)
    assert "done 150" in output
    assert CommitLog(run.child("checkpoints")).head().epoch == 1
    check(run)


@pytest.mark.long  # `test_elastic.py` kills a driver on Ray
def test_a_killed_driver_s_run_is_taken_over_at_once(folder):
    run = store(config(folder).run_uri)
    first = drive(folder)
    wait_for_checkpoints(run, 1)
    first.kill()
    first.wait()
    (folder / "hurry").touch()
    second = drive(folder)
    output, _ = second.communicate(timeout=600)
    assert "done 150" in output
    assert "waiting up to" not in output
    check(run)


def test_the_audit_refuses_what_two_drivers_wrote(folder):
    """Without owners, as before: both drivers write as generation 0."""
    settings = config(folder, "run", "steps=6")
    fit_local(settings)
    run = store(settings.run_uri)
    other = config(folder, "other", "steps=6", "optimizer.learning_rate=3e-2")
    fit_local(other)
    for name in ("metrics.jsonl", "batches.jsonl"):
        log = jsonlog.JsonLog(run, name)
        for line in jsonlog.read(store(other.run_uri), name):
            log.append({**line, "time": 1.0})
        log.flush()
    audited = audit(run.uri)
    assert not audited.ok
    assert any("has two losses" in line for line in audited.mismatches)
    assert any("two drivers trained this run at once" in line for line in audited.mismatches)
