"""Tests that a run whose host runs one step ahead is the same run: same bits, same records, same requests.

A CPU has nothing to gain from it. The order of the host's work is that on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import on_ranks
from tests.unit.train.helpers import FileCheckpoints, Replaced, config, write_shards
from tests.unit.train.test_bad_steps import events, log, plant, sequences, weights
from tidewheel import storage
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.elastic.trainer import LocalControl, fit_local
from tidewheel.jsonlog import JsonLog
from tidewheel.train import loop
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.runtime import NoControl, Runtime
from tidewheel.train.step import StartedStep

STEPS = 12
BASE = (f"steps={STEPS}", "data.validation=''", "evaluation={every_steps: 0, sample_tokens: 0}", "guards.window=8",
        "checkpoint.every_steps=5", "metrics.trackers=[]")
TIMES = {"time", "seconds", "step_seconds", "data_wait_seconds", "communication_seconds", "tokens_per_second",
         "tokens_per_second_per_worker", "host_resident_bytes", "stall_seconds"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("ahead")
    write_shards(base / "shards", rows=60)
    write_shards(base / "validation", shards=1, rows=8, seed=1)
    return base


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: without_times([value])[0] if isinstance(value, dict) else value for name, value in line.items()
             if name not in TIMES} for line in lines]


def both(folder: Path, name: str, *overrides: str, run: Callable[[TrainConfig], Any] = fit_local) -> list[TrainConfig]:
    """Run with and without running ahead, and compare all records and the weights."""
    pair = [config(folder, f"{name}-{ahead}", *BASE, *overrides, f"run_ahead={ahead}") for ahead in ("false", "true")]
    assert len({settings.recipe_hash() for settings in pair}) == 1
    for settings in pair:
        run(settings)
    for file in ("metrics.jsonl", "batches.jsonl", "events.jsonl"):
        one, other = (without_times(log(settings, file)) for settings in pair)
        assert one == other, file
    mine, theirs = (weights(settings) for settings in pair)
    assert mine.keys() == theirs.keys()
    for tensor in mine:
        np.testing.assert_array_equal(mine[tensor], theirs[tensor], err_msg=tensor)
    assert all(audit(settings.run_uri).ok for settings in pair)
    return pair


def in_step(settings: TrainConfig) -> None:
    """Run with saves that are committed before the next step, so that a rollback finds the newest."""
    run_store = storage.store(settings.run_uri)
    train(settings, Runtime(checkpoints=CheckpointManager(run_store.child("checkpoints"), asynchronous=False),
                            control=LocalControl(JsonLog(run_store, "events.jsonl"), None)))


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record when steps of the loop are started and when their results are first read."""
    recorded: list[str] = []
    real = loop.start_step

    class Observed(StartedStep):
        def __init__(self, started: StartedStep, number: int) -> None:
            self.gradient_bytes = started.gradient_bytes
            self._started, self._number = started, number

        def result(self):
            if f"read {self._number}" not in recorded:
                recorded.append(f"read {self._number}")
            return self._started.result()

        def drop(self) -> None:
            recorded.append(f"drop {self._number}")
            self._started.drop()

    def start_step(*arguments: Any, **named: Any) -> StartedStep:
        number = 1 + sum(entry.startswith("start") for entry in recorded)
        recorded.append(f"start {number}")
        return Observed(real(*arguments, **named), number)

    monkeypatch.setattr(loop, "start_step", start_step)
    return recorded


def ahead_of(order: list[str]) -> list[int]:
    """Return the steps whose result was read after the next step was started."""
    steps = [int(entry.split()[1]) for entry in order if entry.startswith("start")]
    return [step for step in steps[:-1] if order.index(f"read {step}") > order.index(f"start {step + 1}")]


def test_the_host_runs_ahead_except_of_steps_that_something_follows(folder: Path, order: list[str]):
    """Waited for are the first step, saves (5, 10), evaluations (4, 8), the sample (6), profiles (3) and the last."""
    settings = config(folder, "order", *BASE, "run_ahead=true", f"data.validation={folder}/validation",
                      "evaluation={every_steps: 4, sample_tokens: 3, sample_every_steps: 6}", "profile.steps=[3]")
    fit_local(settings)
    assert ahead_of(order) == [7, 9, 11]
    assert order[-1] == f"read {STEPS}"


def test_on_cpu_the_host_does_not_run_ahead_unless_asked(folder: Path, order: list[str]):
    fit_local(config(folder, "default", *BASE))
    assert ahead_of(order) == []


@pytest.mark.parametrize("overrides", [
    (), ("reproducible=true",), ("precision=fp16",), ("checkpoint.every_steps=1",),
    ("evaluation={every_steps: 3, sample_tokens: 3, sample_every_steps: 4}", "data.validation=VALIDATION")],
    ids=lambda overrides: "-".join(overrides)[:30] or "plain")
def test_a_run_that_runs_ahead_is_the_same_run(folder: Path, overrides: tuple[str, ...]):
    overrides = tuple(part.replace("VALIDATION", str(folder / "validation")) for part in overrides)
    both(folder, f"same{len(str(overrides))}", *overrides)


@pytest.mark.parametrize(("policy", "wrong"), [("guards.non_finite=skip", "nan"), ("guards.non_finite=rollback", "nan"),
                                               ("guards.spike=rollback", "spike")])
def test_a_bad_step_is_withheld_though_the_next_has_started(folder: Path, policy: str, wrong: str, order: list[str],
                                                            monkeypatch: pytest.MonkeyPatch):
    """The step behind a bad one was computed from the weights before it; a rollback drops it without a record."""
    plant({sequences(folder, 8)[2]: wrong}, monkeypatch)
    settings, _ = both(folder, policy.replace("=", "-"), policy, run=in_step)
    assert [detail["step"] for detail in events(settings, "guard")] == [8]
    assert bool(events(settings, "rollback")) == ("rollback" in policy)
    before = STEPS + 3 if "rollback" in policy else STEPS  # steps of the first run; 6 to 8 were done again
    assert order.index(f"start {before + 9}") < order.index(f"read {before + 8}")
    assert (f"read {before + 9}" in order) == ("rollback" not in policy)
    assert [entry for entry in order if "drop" in entry] == [f"drop {before + 9}"] * ("rollback" in policy)


def test_the_run_ends_one_step_later_if_a_guard_stops_it(folder: Path, monkeypatch: pytest.MonkeyPatch):
    plant({sequences(folder, 8)[2]: "nan"}, monkeypatch)
    for ahead in ("false", "true"):
        settings = config(folder, f"stops-{ahead}", *BASE, "guards.non_finite=stop", f"run_ahead={ahead}")
        with pytest.raises(Exception, match="non-finite loss at step 8"):
            fit_local(settings)
        assert [line["step"] for line in log(settings, "batches.jsonl")] == list(range(1, 8))


class Asks(NoControl):
    """A control that asks for a stop, or for a save, once a step is recorded, until it has happened."""

    def __init__(self, *, stop_after: int = -1, save_after: int = -1) -> None:
        self.stop_after, self.save_after, self.done = stop_after, save_after, 0
        self.held = -1
        self.saved: list[int] = []

    def poll(self) -> bool:
        return 0 <= self.stop_after <= self.done

    def save_requested(self) -> bool:
        return 0 <= self.save_after <= self.done and not self.saved

    def progress(self, step: int, steps: int, **metrics: Any) -> None:
        self.done = step

    def event(self, kind: str, **detail: Any) -> None:
        if kind == "save":
            self.saved.append(detail["step"])

    def hold(self, step: int) -> None:
        self.held = step
        raise Replaced


@pytest.mark.parametrize(("ahead", "last"), [("false", 4), ("true", 6)])
def test_a_stop_saves_and_ends_at_a_step_boundary(folder: Path, tmp_path: Path, ahead: str, last: int):
    """Step 4 was started before 3 was recorded. The request is announced in step 5 and answered after step 6."""
    settings = config(folder, f"stop-{ahead}", *BASE, "checkpoint.every_steps=100", f"run_ahead={ahead}")
    checkpoints = FileCheckpoints(tmp_path / "state.npz")
    control = Asks(stop_after=3)
    with pytest.raises(Replaced):
        train(settings, Runtime(checkpoints=checkpoints, control=control))
    assert (control.held, control.saved) == (last, [last])
    assert [line["step"] for line in log(settings, "batches.jsonl")] == list(range(1, last + 1))
    with np.load(tmp_path / "state.npz") as saved:
        assert json.loads(str(saved["extra"]))["step"] == last
    train(settings, Runtime(checkpoints=checkpoints, generation=1))
    assert [line["step"] for line in log(settings, "batches.jsonl")] == list(range(1, STEPS + 1)), "none twice"
    plain = config(folder, f"stop-{ahead}-plain", *BASE, "checkpoint.every_steps=100", "run_ahead=false")
    train(plain, Runtime())
    losses = [{line["step"]: line["loss"] for line in log(run, "metrics.jsonl")} for run in (settings, plain)]
    assert losses[0] == losses[1]


def test_a_requested_save_is_made_once(folder: Path, tmp_path: Path):
    settings = config(folder, "save", *BASE, "checkpoint.every_steps=100", "run_ahead=true")
    control = Asks(save_after=3)
    train(settings, Runtime(checkpoints=FileCheckpoints(tmp_path / "state.npz"), control=control))
    assert control.saved == [6, STEPS]


def two_ranks(folder: Path) -> None:
    rank = torch.distributed.get_rank()
    for ahead in ("false", "true"):
        settings = config(folder, f"two-{ahead}", *BASE, f"run_ahead={ahead}", "metrics.straggler.every_steps=2",
                          "guards.non_finite=rollback")
        with pytest.MonkeyPatch.context() as patch:
            plant({sequences(folder, 8)[2]: "nan"}, patch)
            control = Asks(save_after=3)
            train(settings, Runtime(rank, 2, control=control,
                                    checkpoints=FileCheckpoints(folder / f"two-{ahead}.npz")))


def test_two_ranks_decide_alike(folder: Path):
    """One of them reads the bad sequence, and only rank 0 hears the request."""
    on_ranks(2, two_ranks, folder)
    for ahead in ("false", "true"):
        settings = config(folder, f"two-{ahead}", *BASE)
        assert audit(settings.run_uri).ok
        assert [line["step"] for line in log(settings, "passed_over.jsonl")] == [8]
    saved = [dict(np.load(folder / f"two-{ahead}.npz")) for ahead in ("false", "true")]
    for name in saved[0].keys() - {"extra"}:
        np.testing.assert_array_equal(saved[0][name], saved[1][name], err_msg=name)
