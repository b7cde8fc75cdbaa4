"""Tests that the evaluation of a checkpoint equals the training's own, afterwards and beside the training."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from tests.unit.train.helpers import LENGTH, config, write_shards
from tidewheel import jsonlog
from tidewheel.cli import run_command
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import CheckpointError, ConfigError
from tidewheel.inference.evaluate import Evaluator
from tidewheel.inference.watch import watch
from tidewheel.storage import store
from tidewheel.train.config import TrainConfig


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("evaluation")
    write_shards(folder / "shards")
    settings = config(folder, "run", f"data.validation={folder}/shards", "steps=6", "evaluation.every_steps=3",
                      "evaluation.sequences=7", "checkpoint.every_steps=3")
    fit_local(settings)
    return settings


def scores(run: TrainConfig) -> dict[int, dict]:
    return {line["step"]: line["validation"][""] for line in jsonlog.read(store(run.run_uri), "metrics.jsonl")
            if "validation_loss" in line}


def test_an_evaluation_equals_the_validation_loss_of_the_training(run: TrainConfig):
    all_scores = scores(run)
    assert sorted(all_scores) == [3, 6]
    evaluator = Evaluator(run.run_uri, device="cpu")
    for step in (6, 3):
        evaluated = evaluator.evaluate(f"{run.run_uri}/checkpoints/step_{step:08d}")
        assert (evaluated.step, evaluated.loss) == (step, pytest.approx(all_scores[step]["loss"], rel=1e-6))
        assert evaluated.scores[""].bits_per_byte == pytest.approx(all_scores[step]["bits_per_byte"], rel=1e-6)
        assert evaluated.scores[""].tokens == all_scores[step]["tokens"]


def test_losses_by_position_add_up_to_the_loss(run: TrainConfig, capsys: pytest.CaptureFixture[str]):
    evaluator = Evaluator(run.run_uri, device="cpu")
    whole = evaluator.evaluate(run.run_uri).scores[""]
    parts = evaluator.by_position(run.run_uri, [2, 5, LENGTH, 2 * LENGTH])[""]
    assert [(part.start, part.end) for part in parts] == [(0, 2), (2, 5), (5, LENGTH), (LENGTH, 2 * LENGTH)]
    assert sum(part.tokens for part in parts) == whole.tokens
    assert sum(part.loss * part.tokens for part in parts if part.loss) / whole.tokens == pytest.approx(whole.loss)
    assert (parts[-1].loss, parts[-1].tokens) == (None, 0), "no document is as long as the row"
    assert run_command(["evaluate", run.run_uri, "--positions", "2,5", "--json"]) == 0
    assert [line["loss"] for line in json.loads(capsys.readouterr().out)] == [
        pytest.approx(part.loss, abs=1e-4) for part in parts[:2]]
    assert run_command(["evaluate", run.run_uri, "--positions", "5,2"]) == 2
    assert run_command(["evaluate", run.run_uri, "--positions", "five"]) == 2


def test_the_command_evaluates_the_given_sets(run: TrainConfig, capsys: pytest.CaptureFixture[str]):
    assert run_command(["evaluate", run.run_uri, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(scores(run)[6]["loss"], rel=1e-6)
    sets = ["--data", f"one={run.data.uri}", "--data", f"two={run.data.uri}", "--sequences", "3"]
    assert run_command(["evaluate", run.run_uri, *sets, "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)["sets"]
    assert (one.pop("set"), two.pop("set")) == ("one", "two")
    assert one == two
    assert run_command(["evaluate", run.run_uri, "--data", "a", "--data", "b"]) == 2
    assert run_command(["evaluate", run.run_uri + "-not"]) == 2


class CountedEnd(threading.Event):
    """The end of a watch, which waits for it between two looks."""

    looks = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.looks += 1
        return super().wait(timeout)


def test_checkpoints_are_evaluated_as_they_are_committed(run: TrainConfig, tmp_path: Path):
    """A damaged checkpoint is skipped, and none is evaluated twice."""
    uri, ended, events = run.run_uri, CountedEnd(), list[tuple[str, dict]]()
    copy = store(tmp_path / "run")
    for key in ("run.json", *(entry.key for entry in store(uri).list("checkpoints/step_00000003"))):
        copy.write(key, store(uri).read(key))
    thread = threading.Thread(target=watch, args=(copy.uri,), daemon=True,
                              kwargs={"every_steps": 3, "ended": ended, "device": "cpu", "seconds": 0.05,
                                      "on_event": lambda kind, detail: events.append((kind, detail))})
    thread.start()

    def told(step: int) -> list[dict]:
        return [line for line in jsonlog.read(copy, "metrics.jsonl") if line["step"] == step]

    until = time.monotonic() + 120
    while not told(3) and time.monotonic() < until:
        time.sleep(0.05)
    files = store(uri).list("checkpoints/step_00000006")
    for entry in sorted(files, key=lambda entry: entry.key.endswith("manifest.json")):
        content = store(uri).read(entry.key)
        copy.write(entry.key, content if entry.key.endswith(".json") else content[:-1] + bytes([content[-1] ^ 1]))
    while not events and time.monotonic() < until:
        time.sleep(0.05)
    looked = ended.looks
    while ended.looks < looked + 4 and time.monotonic() < until:
        time.sleep(0.05)
    assert ended.looks >= looked + 4
    assert thread.is_alive()
    assert not told(6)
    [(kind, detail)] = events  # told once, however often it is looked at
    assert kind == "evaluation_failed"
    assert "hash" in detail["reason"]
    for entry in files:
        copy.write(entry.key, store(uri).read(entry.key))
    while not told(6) and time.monotonic() < until:
        time.sleep(0.05)
    ended.set()
    thread.join(60)
    for step in (3, 6):
        [line] = told(step)
        assert line["validation_loss"] == pytest.approx(scores(run)[step]["loss"], rel=1e-6)


def test_an_evaluation_without_a_usable_set_or_checkpoint_is_refused(run: TrainConfig, tmp_path: Path):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        Evaluator(str(tmp_path))
    settings = config(tmp_path, "bare", f"data.uri={run.data.uri}", "data.validation=''", "steps=1")
    fit_local(settings)
    with pytest.raises(ConfigError, match="no validation set"):
        Evaluator(settings.run_uri)
    with pytest.raises(ConfigError, match="every_steps is 0"):
        config(tmp_path, "x", "evaluation.separate=true", "evaluation.every_steps=0")
    with pytest.raises(ConfigError, match="separate false"):
        config(tmp_path, "x", "evaluation={separate: true, every_steps: 3}", "checkpoint.keep_best=1")
    with pytest.raises(ConfigError, match="separate true"):
        config(tmp_path, "x", "evaluation.gpus=1")
