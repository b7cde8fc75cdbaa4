"""A fault that only one worker has does not end the run. Real processes, without Ray."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.in_place import Group, finished, prepare
from tidewheel.elastic.coordinator import Coordinator
from tidewheel.errors import StorageAwayError
from tidewheel.shards.loader import Loader

pytestmark = pytest.mark.cluster

BAD = "node of b"
ECC = "CUDA error: uncorrectable ECC error encountered"


def _reading_fails(node: str, flag: Path, error: Exception) -> None:
    batch = Loader.batch

    def failing(self: Loader, *arguments: Any) -> Any:
        if node == BAD and flag.exists():
            raise error
        return batch(self, *arguments)

    Loader.batch = failing  # type: ignore[method-assign]


def storage_away(node: str, flag: Path) -> None:
    _reading_fails(node, flag, StorageAwayError("the store does not answer", where="s3://bucket/x", fix="wait"))


def disk_full(node: str, flag: Path) -> None:
    _reading_fails(node, flag, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/cache/x.arrow"))


def mistake(node: str, flag: Path) -> None:
    _reading_fails(node, flag, ValueError("token 70000 does not fit uint16"))


def bad_gpu(node: str, flag: Path) -> None:
    """A device that fails in every process of its node."""
    from tidewheel.elastic import probe
    from tidewheel.train import loop

    step = loop.start_step

    def failing(*arguments: Any, **named: Any) -> Any:
        if node == BAD and flag.exists():
            raise RuntimeError(ECC)
        return step(*arguments, **named)

    def check_arithmetic(device: Any) -> None:
        if node == BAD and flag.exists():
            raise RuntimeError(ECC)

    assert probe.check_arithmetic
    loop.start_step, probe.check_arithmetic = failing, check_arithmetic


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    """Two workers, one standby worker, and a fault on the node of b, which has a rank."""
    monkeypatch.setattr(Coordinator, "_watch", lambda self: None)  # it would ask Ray
    settings = prepare(tmp_path, readmit_after_seconds=0.5, readmit_at_most_seconds=60.0)
    group = Group(settings, tmp_path, (2,), request.param)
    group.add("a", "b", anew=True)
    group.wait(lambda: group.step() >= 3)
    group.add("c")
    group.wait(lambda: group.coordinator.standing_by() == 1)
    Path(settings.run.uri, "fault").touch()
    yield group
    group.end()


#: Of the errors of one worker one is enough here; `test_elastic.py` has a mistake on Ray, `test_blame.py` has them all.
@pytest.mark.parametrize("group", [storage_away, *(pytest.param(fault, marks=pytest.mark.long)
                                                   for fault in (mistake, disk_full, bad_gpu))], indirect=True)
def test_a_worker_that_fails_is_left_out_and_the_run_continues(group: Group):
    group.wait(lambda: group.events("worker_left_out") != [])
    group.wait(lambda: not group.processes["b"].is_alive())  # its process ends
    group.wait(lambda: group.coordinator.snapshot().generation == 1)
    finished(group)
    [failure] = group.events("failure")
    [out] = group.events("worker_left_out")
    assert (out["detail"]["node"], out["detail"]["level"]) == (BAD, "process")
    assert failure["detail"]["recovery"] == "in_place"
    assert failure["detail"]["error"][:300] == out["detail"]["reason"]
    assert "losed" not in failure["detail"]["error"]  # a peer's closed connection is not the cause
    assert group.processes["a"].exitcode == 0
    assert group.processes["c"].exitcode == 0


@pytest.mark.parametrize("group", [bad_gpu], indirect=True)
def test_a_bad_device_does_not_pass_its_test_at_the_start(group: Group):
    group.wait(lambda: group.events("worker_left_out") != [])
    for number in range(2, 4):
        group.add(f"b{number}", node=BAD)
        group.wait(lambda: not group.processes[f"b{number}"].is_alive())  # noqa: B023
    finished(group)
    reasons = [event["detail"]["reason"] for event in group.events("worker_left_out")]
    assert [ECC in reason for reason in reasons] == [True] * 3
    assert ["its test at the start failed" in reason for reason in reasons] == [False, True, True]
    assert len(group.events("failure")) == 1
    told = group.told()
    assert [(item.cause.key, item.times) for item in told.incidents] == [("start", 1), ("gpu", 1), ("probe_failed", 2)]
    assert {node: counts.total() for node, counts in told.repeaters.items()} == {BAD: 3}
    [line] = told.history  # kept beside the run, for the runs after it
    assert (line.host, line.failures, line.runs) == (BAD, 3, 1)
