"""Tests of the settings that may change between starts of a run, and of their record in run.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.train.helpers import config, write_shards
from tidewheel import jsonlog
from tidewheel.config import build
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import ConfigError
from tidewheel.parts import Kind
from tidewheel.storage import store
from tidewheel.train import optimizers, schedules
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig
from tidewheel.train.starts import REFUSED, REFUSED_IF_REPRODUCIBLE, changed, last_settings, settings_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(tmp_path / "shards", rows=60)
    write_shards(tmp_path / "validation", shards=1, rows=11, seed=1)
    return tmp_path


def run_json(folder: Path) -> dict:
    return json.loads((folder / "runs" / "run" / "run.json").read_text())


def test_each_start_is_recorded_and_reported(folder):
    fit_local(config(folder, "run", "steps=6"))
    events = []
    fit_local(config(folder, "run", "steps=12", "optimizer.learning_rate=1e-4", "checkpoint.keep_last=2"),
              on_progress=lambda progress: events.extend(progress.get("events", ())))
    run = run_json(folder)
    assert run["config"]["steps"] == 6
    assert [start["epoch"] for start in run["starts"]] == [1]
    assert run["starts"][0]["changed"] == {"steps": 12, "optimizer.learning_rate": 1e-4, "checkpoint.keep_last": 2}
    assert last_settings(run) == settings_of(config(folder, "run", "steps=12", "optimizer.learning_rate=1e-4",
                                                    "checkpoint.keep_last=2"))
    assert last_settings(run, 0)["steps"] == 6
    changes = {event["detail"]["setting"]: event["detail"] for event in events if event["kind"] == "setting_changed"}
    assert changes == {"steps": {"setting": "steps", "before": 6, "now": 12},
                    "optimizer.learning_rate": {"setting": "optimizer.learning_rate", "before": 3e-3, "now": 1e-4}}
    recorded = [event for event in jsonlog.read(store(folder / "runs" / "run"), "events.jsonl")
            if event["kind"] == "setting_changed"]
    assert len(recorded) == 2
    assert audit(str(folder / "runs" / "run")).ok


@pytest.mark.parametrize(("override", "says"), [
    ("optimizer.kind=lion", "optimizer.kind was adamw, now lion: the saved state belongs"),
    ("batch.virtual_ranks=2", "batch.virtual_ranks was 4, now 2"),
    ("model.dim=64", "model.dim was 32, now 64"),
    ("data.seed=8", "data.seed was 7, now 8"),
])
def test_settings_that_define_the_run_cannot_change(folder, override, says):
    fit_local(config(folder, "run", "steps=3"))
    before = run_json(folder)
    with pytest.raises(ConfigError, match=says) as refused:
        fit_local(config(folder, "run", "steps=6", override))
    assert "--set " in refused.value.fix
    assert run_json(folder) == before
    assert fit_local(config(folder, "run", "steps=6")).steps == 6, "the refused start left no trace"


def test_reproducible_runs_refuse_changes_of_their_bits(folder):
    fit_local(config(folder, "run", "steps=3", "reproducible=true"))
    with pytest.raises(ConfigError, match=r"batch\.micro_sequences was 2, now 1"):
        fit_local(config(folder, "run", "steps=6", "reproducible=true", "batch.micro_sequences=1"))


def test_a_setting_that_is_new_in_this_version_has_not_changed(folder):
    now = settings_of(config(folder))
    before = dict(now)
    del before["optimizer.kind"]
    assert changed(before, now, reproducible=False) == []


def raised(monkeypatch: pytest.MonkeyPatch, kind: Kind, name: str) -> None:
    """Raise the version of a built-in part by one, as a later release would."""
    part = kind.find(name)
    monkeypatch.setattr(part, "VERSION", replace(part.VERSION, number=part.VERSION.number + 1))


def test_a_changed_part_version_is_reported_and_recorded(folder, monkeypatch):
    fit_local(config(folder, "run", "steps=3"))
    assert run_json(folder)["part_versions"]["optimizer_adamw"] == 1
    raised(monkeypatch, optimizers.KIND, "adamw")
    events = []
    fit_local(config(folder, "run", "steps=6"), on_progress=lambda progress: events.extend(progress.get("events", ())))
    changes = {event["detail"]["setting"]: event["detail"] for event in events if event["kind"] == "setting_changed"}
    assert changes["version.optimizer_adamw"] == {"setting": "version.optimizer_adamw", "before": 1, "now": 2}
    run = run_json(folder)
    assert run["part_versions"]["optimizer_adamw"] == 1
    assert run["starts"][0]["part_versions"]["optimizer_adamw"] == 2
    assert last_settings(run)["version.optimizer_adamw"] == 2
    assert last_settings(run, 0)["version.optimizer_adamw"] == 1
    fit_local(config(folder, "run", "steps=9"))
    assert "part_versions" not in run_json(folder)["starts"][1]


def test_reproducible_mode_refuses_a_part_of_another_version(folder, monkeypatch):
    fit_local(config(folder, "run", "steps=3", "reproducible=true"))
    before = run_json(folder)
    raised(monkeypatch, optimizers.KIND, "adamw")
    with pytest.raises(ConfigError, match=r"version\.optimizer_adamw was 1, now 2: every later") as refused:
        fit_local(config(folder, "run", "steps=6", "reproducible=true"))
    assert "the release of tidewheel that the run began with" in refused.value.fix
    assert "--set version" not in refused.value.fix
    assert run_json(folder) == before


def test_a_part_that_the_start_before_did_not_use_has_no_version_to_compare():
    now = settings_of(build(TrainConfig, {"schedule": {"kind": "linear"}}))
    before = settings_of(build(TrainConfig, {"schedule": {"kind": "cosine"}}))
    assert {change.key for change in changed(before, now, reproducible=True)} == {"schedule.kind"}


def test_a_run_without_recorded_versions_has_used_the_first(folder, monkeypatch):
    now = settings_of(build(TrainConfig, {}))
    before = {key: value for key, value in now.items() if not key.startswith("version.")}
    assert changed(before, now, reproducible=True) == []
    raised(monkeypatch, schedules.KIND, "cosine")
    (change,) = changed(before, settings_of(build(TrainConfig, {})), reproducible=True)
    assert (change.key, change.before, change.now) == ("version.schedule_cosine", 1, 2)
    assert change.refused


def test_every_rule_names_an_existing_setting():
    known = settings_of(build(TrainConfig, {"objective": {"kind": "grpo"}, "rollouts": {
        "prompts": "prompts.jsonl", "reward": {"kind": "exact_match"}}}))
    known |= settings_of(build(TrainConfig, {"outer": {"groups": 2, "store": "meeting"}}))  # which rollouts exclude
    for name in (*REFUSED, *REFUSED_IF_REPRODUCIBLE):
        assert any(key == name or key.startswith(f"{name}.") for key in known), name
