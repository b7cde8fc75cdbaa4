"""Tests that a process opens a run once and passes its handle on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.train.helpers import Replaced, Script, config, write_shards
from tidewheel import cli
from tidewheel.elastic import trainer
from tidewheel.report import run as report
from tidewheel.storage import LocalStore
from tidewheel.train import checks
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.record import TrainResult
from tidewheel.train.run import Run
from tidewheel.train.runtime import Runtime


class Opened:
    """A counter of how often this process opens the folder of a run before the first step is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, settings: TrainConfig) -> None:
        self.count = 0
        self.at_first_step = -1
        folder, opened = Path(settings.run_uri), LocalStore.__init__

        def count(store: LocalStore, root: str | Path) -> None:
            opened(store, root)
            self.count += store.root == folder

        monkeypatch.setattr(LocalStore, "__init__", count)

    def on_progress(self, progress: dict[str, Any]) -> None:
        """Store the count when the first step is reported."""
        if progress.get("step") == 1:
            self.at_first_step = self.count


@pytest.fixture
def settings(tmp_path: Path) -> TrainConfig:
    write_shards(tmp_path / "shards")
    return config(tmp_path, "run", "data.validation=''", "steps=2", "evaluation.every_steps=0",
                  "evaluation.sample_tokens=0")


def test_fit_local_opens_the_run_once_before_the_first_step(settings: TrainConfig, monkeypatch: pytest.MonkeyPatch):
    opened = Opened(monkeypatch, settings)
    trainer.fit_local(settings, on_progress=opened.on_progress)
    assert opened.at_first_step == 1


def test_the_command_opens_the_run_once_before_the_first_step(settings: TrainConfig, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "train.json"  # JSON is YAML too
    file.write_text(json.dumps(settings.canonical()))
    opened = Opened(monkeypatch, settings)
    fit_local = trainer.fit_local

    def noting(run: Run, *, on_progress: trainer.OnProgress, **options: Any) -> TrainResult:
        def both(progress: dict[str, Any]) -> None:
            opened.on_progress(progress)
            on_progress(progress)

        return fit_local(run, on_progress=both, **options)

    monkeypatch.setattr(trainer, "fit_local", noting)
    monkeypatch.setattr(report, "write_run_report", lambda uri: uri)
    assert cli.train(str(file), local=True) == 0
    assert opened.at_first_step == 1


def test_fit_opens_the_run_once_and_reads_the_data_once_before_it_starts_workers(settings: TrainConfig,
                                                                                monkeypatch: pytest.MonkeyPatch):
    """`workflow.Train.run` and `tidewheel train` call `fit`; each process that it starts opens the run itself."""
    opened = Opened(monkeypatch, settings)
    read_data = checks.read_data
    reads: list[str] = []
    monkeypatch.setattr(checks, "read_data", lambda config: (reads.append(config.run.id), read_data(config))[1])
    started: list[Run] = []

    def run_workers(run: Run, worker: Any, on_progress: Any, *, take_over: bool) -> TrainResult:
        started.append(Run.open(run))
        return TrainResult(2, 0, None, None, "", 0.0, run.uri)

    monkeypatch.setattr(trainer, "run_workers", run_workers)
    run = Run.open(settings)
    run.check()
    trainer.fit(run)
    assert started == [run]
    assert (opened.count, reads) == (1, ["run"])


def test_a_run_that_is_open_is_not_opened_again(settings: TrainConfig):
    run = Run.open(settings)
    assert Run.open(run) is run
    assert run.data() is run.data()


def test_an_open_run_has_absolute_uris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    relative = config(Path("."), "run", "data.cache=cache", "data.validation={web: validation}")
    run = Run.open(relative)
    assert run.uri == str(tmp_path / "runs" / "run") == run.config.run_uri
    assert run.checkpoints.uri == str(tmp_path / "runs" / "run" / "checkpoints")
    assert run.config.data.uri == str(tmp_path / "shards")
    assert run.config.data.cache == str(tmp_path / "cache")
    assert run.config.data.validation == {"web": str(tmp_path / "validation")}


def test_a_worker_opens_the_run_once_for_all_its_generations(settings: TrainConfig, monkeypatch: pytest.MonkeyPatch):
    opened = Opened(monkeypatch, settings)
    run = Run.open(settings)
    with pytest.raises(Replaced):
        train(run, Runtime(control=Script(die=1)))
    assert train(run, Runtime(generation=1)).steps == 2
    assert opened.count == 1
