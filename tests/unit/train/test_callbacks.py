"""Tests that the loop calls a user's callbacks and trackers in order, and again after a failure."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path

import pytest

import tidewheel as tw
from tests.unit.train.helpers import FileCheckpoints, Replaced, Script, config, write_shards
from tidewheel import jsonlog, storage
from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.inference.sample import text_sample
from tidewheel.report.run import write_run_report
from tidewheel.train.callback import Callback, Callbacks, Step, Worker
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.record import TrainResult
from tidewheel.train.runtime import Runtime

OWN = '''
import csv
import json
import tidewheel as tw


class Diary(tw.Callback):
    path: str
    fail_at: int = 0
    _started: int = 0

    def note(self, *words):
        with open(self.path, "a") as file:
            file.write(json.dumps(words) + "\\n")

    def on_start(self, worker, step):
        self._started += 1
        self.note("start", step, worker.run, worker.rank, worker.generation, self._started)

    def on_step_end(self, worker, step):
        if step.step == self.fail_at:
            raise ZeroDivisionError("as it was told to")
        self.note("step", step.step, step.redone, step.loss, step.learning_rate)
        worker.record(step.step, {"twice_the_step": 2 * step.step})

    def on_evaluate(self, worker, step, scores):
        self.note("evaluate", step, sorted(scores))

    def on_sample(self, worker, step, text):
        self.note("sample", step, bool(text))

    def on_checkpoint(self, worker, step):
        self.note("checkpoint", step)

    def on_finish(self, worker, result):
        self.note("finish", result.steps)

    def on_close(self):
        self.note("close")


class Table(tw.Tracker):
    path: str

    def write(self, record):
        if "loss" in record:
            with open(self.path, "a", newline="") as file:
                csv.writer(file).writerow([record["step"], record["loss"], record["tokens"]])
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with shards and a module of the user's own, and make it the working folder."""
    write_shards(tmp_path / "shards")
    write_shards(tmp_path / "validation", shards=1, rows=11, seed=1)
    (tmp_path / f"{module(tmp_path)}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def module(folder: Path) -> str:
    return f"own_{folder.name.replace('-', '_')}"


def settings(folder: Path, **parts: object) -> TrainConfig:
    diary = {"kind": f"{module(folder)}:Diary", "path": str(folder / "diary"), **parts}
    table = {"kind": f"{module(folder)}:Table", "path": str(folder / "table.csv")}
    return build(TrainConfig, {**config(folder).canonical(), "callbacks": [diary],
                               "metrics": {"trackers": [table]}})


def diary(folder: Path) -> list[list]:
    return [json.loads(line) for line in (folder / "diary").read_text().splitlines()]


def test_a_callback_is_called_for_everything_in_order(folder: Path):
    train(settings(folder), Runtime(checkpoints=FileCheckpoints(folder / "c.npz"), sampler=text_sample))
    entries = diary(folder)
    assert [line[:2] for line in entries] == [
        ["start", 0], ["step", 1], ["step", 2], ["step", 3], ["evaluate", 3], ["step", 4], ["checkpoint", 3],
        ["step", 5], ["step", 6], ["evaluate", 6], ["step", 7], ["checkpoint", 6], ["step", 8], ["evaluate", 8],
        ["sample", 8], ["checkpoint", 8], ["finish", 8], ["close"]]
    metrics = jsonlog.read(storage.store(folder / "runs/run"), "metrics.jsonl")
    losses = {line["step"]: line["loss"] for line in metrics if "loss" in line}
    rates = {line["step"]: line["learning_rate"] for line in metrics if "loss" in line}
    assert [line[1:] for line in entries if line[0] == "step"] == [
        [step, False, losses[step], rates[step]] for step in range(1, 9)]
    assert [line["twice_the_step"] for line in metrics if "twice_the_step" in line] == [2 * s for s in range(1, 9)]
    assert write_run_report(str(folder / "runs/run"))


def test_callbacks_see_repeated_steps_again(folder: Path):
    run = settings(folder)
    with pytest.raises(Replaced):
        train(run, Runtime(checkpoints=FileCheckpoints(folder / "c.npz"), control=Script(die=5)))
    train(run, Runtime(checkpoints=FileCheckpoints(folder / "c.npz"), generation=1))
    entries = diary(folder)
    steps = [line[1:4] for line in entries if line[0] == "step"]
    # the worker died while it reported step 5 to the cluster, before the callback was called
    assert [step for step, _, _ in steps] == [1, 2, 3, 4, 4, 5, 6, 7, 8]
    assert [redone for _, redone, _ in steps] == [False] * 4 + [True, True, False, False, False]
    assert steps[3][2] == steps[4][2]  # with the same loss
    assert [entry for entry in entries if entry[0] == "start"] == [
        ["start", 0, "run", 0, 0, 1], ["start", 3, "run", 0, 1, 1]]


def test_a_tracker_gets_each_record(folder: Path):
    train(settings(folder), Runtime(checkpoints=FileCheckpoints(folder / "c.npz")))
    with (folder / "table.csv").open() as file:
        rows = list(csv.reader(file))
    assert [int(row[0]) for row in rows] == list(range(1, 9))


def test_a_mistake_in_a_trackers_code_ends_the_run_with_its_line(folder: Path):
    text = OWN.replace('record["tokens"]', 'record["twice"]')
    (folder / f"{module(folder)}.py").write_text(text)
    control = Script()
    with pytest.raises(ConfigError, match=r"the tracker .*:Table failed in write: KeyError: 'twice'") as raised:
        train(settings(folder), Runtime(checkpoints=FileCheckpoints(folder / "c.npz"), control=control))
    line = next(index for index, line in enumerate(text.splitlines(), 1) if 'record["twice"]' in line)
    assert raised.value.where == f"{folder / module(folder)}.py:{line}"
    assert not [kind for kind, _ in control.events if kind == "sink_failed"]


def test_failures_of_a_trackers_service_are_counted_and_the_run_continues(
        folder: Path, caplog: pytest.LogCaptureFixture):
    (folder / f"{module(folder)}.py").write_text(
        OWN.replace('if "loss" in record:', 'if "loss" in record and record["step"] in (2, 3, 6):')
        .replace('record["tokens"]', '(_ for _ in ()).throw(ConnectionError("the service is away"))'))
    control = Script()
    result = train(settings(folder), Runtime(checkpoints=FileCheckpoints(folder / "c.npz"), control=control))
    assert result.steps == 8
    name = f"{module(folder)}:Table"
    failed = [detail for kind, detail in control.events if kind == "sink_failed"]
    reason = "ConnectionError: the service is away"
    assert failed[0] == {"sink": name, "reason": reason, "failures": 1}
    assert failed[-1] == {"sink": name, "reason": reason, "failures": 3}
    assert f"tracker {name} fails" in caplog.text
    assert f"tracker {name} works again; 3 of its calls have failed so far" in caplog.text


def test_failures_of_a_callbacks_service_are_counted_and_the_run_continues(
        folder: Path, caplog: pytest.LogCaptureFixture):
    (folder / f"{module(folder)}.py").write_text(
        OWN.replace('raise ZeroDivisionError("as it was told to")', 'raise TimeoutError("the service is away")'))
    control = Script()
    result = train(settings(folder, fail_at=5), Runtime(checkpoints=FileCheckpoints(folder / "c.npz"), control=control))
    assert result.steps == 8
    failed = [detail for kind, detail in control.events if kind == "callback_failed"]
    assert failed == [{"callback": f"{module(folder)}:Diary", "hook": "on_step_end",
                       "reason": "TimeoutError: the service is away", "failures": 1}]
    assert "failed in on_step_end, training continues: TimeoutError" in caplog.text


def test_an_error_ends_the_run_with_its_line_and_the_run_resumes_later(folder: Path):
    with pytest.raises(ConfigError, match="Diary failed in on_step_end: ZeroDivisionError: as it was") as raised:
        train(settings(folder, fail_at=5), Runtime(checkpoints=FileCheckpoints(folder / "c.npz")))
    line = OWN.splitlines().index('            raise ZeroDivisionError("as it was told to")') + 1
    assert raised.value.where == f"{folder / module(folder)}.py:{line}"
    assert diary(folder)[-1] == ["close"]
    result = train(settings(folder), Runtime(checkpoints=FileCheckpoints(folder / "c.npz"), generation=1))
    assert result.steps == 8


def test_callbacks_and_trackers_keep_the_recipe_and_reach_the_workers(folder: Path):
    own, plain = settings(folder), config(folder)
    assert own.recipe_hash() == plain.recipe_hash()
    assert {code.name for code in own.code()} == {f"{module(folder)}:Diary", f"{module(folder)}:Table"}
    assert all(code.root == str(folder) for code in own.code())
    assert own.own_parts() == {}  # a run may continue with other ones
    assert plain.code() == []


def test_errors_in_a_list_of_parts_name_the_part(folder: Path):
    for wrong, hint in ((["log_progres"], "did you mean 'log_progress'"), ([{"every_seconds": 3}], "which callback"),
                        ([{"kind": "log_progress", "every_second": 3}], "did you mean 'every_seconds'"),
                        ([f"{module(folder)}:Table"], "Table' is no callback"),
                        (["no_such_module:Thing"], "there is no module")):
        with pytest.raises(ConfigError, match=hint):
            build(TrainConfig, {"callbacks": wrong})


class Everywhere(Callback):
    EVERY_RANK = True

    def on_finish(self, worker: Worker, result: TrainResult) -> None:
        raise ConfigError(f"rank {worker.rank} was told")


class FirstOnly(Callback):
    def on_finish(self, worker: Worker, result: TrainResult) -> None:
        raise AssertionError("told on another rank")

    def on_close(self) -> None:
        raise AssertionError("told on another rank")


def test_callbacks_with_every_rank_run_on_all_ranks():
    worker = Worker("run", "uri", 8, 1, 2, 0, lambda step, figures: None)
    callbacks = Callbacks([FirstOnly(), Everywhere()], worker)
    callbacks.close()
    with pytest.raises(ConfigError, match="rank 1 was told"):
        callbacks.call("on_finish", None)


def test_errors_of_on_close_are_logged(caplog: pytest.LogCaptureFixture):
    Callbacks([FirstOnly()], Worker("run", "uri", 8, 0, 1, 0, lambda step, figures: None)).close()
    assert "FirstOnly failed in on_close" in caplog.text


def test_recorded_figures_must_have_their_own_names(folder: Path):
    (folder / f"{module(folder)}.py").write_text(OWN.replace("twice_the_step", "loss"))
    with pytest.raises(ConfigError, match="'loss' is a name of the training's own figures; choose another"):
        train(settings(folder), Runtime(checkpoints=FileCheckpoints(folder / "c.npz")))


def test_progress_is_logged(caplog: pytest.LogCaptureFixture):
    worker = Worker("run", "uri", 3, 0, 1, 0, lambda step, figures: None)
    callbacks = Callbacks([tw.callbacks.LogProgress(every_seconds=3600)], worker)
    with caplog.at_level(logging.INFO):
        for number in (1, 2, 3):
            callbacks.call("on_step_end", Step(number, 0, 1.5, 1.0, 0.1, 0.25, 0.0, redone=number == 3))
        callbacks.call("on_checkpoint", 3)
    assert [record.getMessage() for record in caplog.records] == [
        "step 1 of 3, loss 1.5000, 0.25 s", "step 3 of 3, loss 1.5000, 0.25 s, repeated",
        "the checkpoint of step 3 is committed"]


def test_the_sdk_takes_the_objects(folder: Path):
    run = tw.Train(config(folder).canonical(), callbacks=[tw.callbacks.LogProgress(every_seconds=5), "log_progress"],
                   metrics={"trackers": ["prometheus"]})
    assert run.resolve().callbacks == (tw.callbacks.LogProgress(every_seconds=5), tw.callbacks.LogProgress())
    assert run.resolve().metrics.trackers == (tw.trackers.Prometheus(),)
