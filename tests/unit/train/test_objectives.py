"""Tests of objectives: the built-in one, a user's own on every layout that it supports, and refused layouts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tidewheel as tw
from tests.ranks import on_ranks
from tests.unit.train.helpers import config as run_config
from tests.unit.train.helpers import write_shards
from tests.unit.train.own_objectives import LabelSmoothing
from tests.unit.train.parallel.layouts import assert_same_training, config, train
from tidewheel.config import build
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import ConfigError
from tidewheel.plan.layout import Job
from tidewheel.plan.memory import logit_rows
from tidewheel.train.config import TrainConfig
from tidewheel.train.metrics.scalars import scalars

OWN = "tests.unit.train.own_objectives"
SMOOTH = {"kind": f"{OWN}:LabelSmoothing", "smoothing": 0.2}


def test_without_smoothing_label_smoothing_equals_the_built_in_objective():
    _, expected = train(config({}), 1, 3)
    _, found = train(config({}, objective={**SMOOTH, "smoothing": 0.0}), 1, 3)
    for ours, theirs in zip(found, expected):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
        assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-5)
        assert ours.metrics["cross_entropy"] == pytest.approx(theirs.loss, rel=1e-6)
        assert theirs.metrics == {}


def test_the_objective_counts_its_terms():
    _, (result,) = train(config({}, objective={"kind": f"{OWN}:ByRow"}), 1, 1)
    assert result.targets == 8, "rows of the global batch"


def every_layout() -> None:
    for layout in ({"tensor": 2}, {"pipeline": 2}, {"pipeline": 2, "pipeline_schedule": "zbv_zero_bubble"},
                   {"context": 2}, {"data": "zero3"}):
        assert_same_training(config(layout, objective=SMOOTH), steps=1)
    assert_same_training(config({"data": "ddp"}, objective={"kind": f"{OWN}:ByRow"}), steps=1)
    for layout in ({"tensor": 2}, {"data": "zero3"}):
        assert_same_training(config(layout, optimizer={"kind": f"{OWN}:Momentum"}), steps=2)
    same_bits(config({"data": "ddp"}, objective=SMOOTH, reproducible=True))


def same_bits(run_config: TrainConfig) -> None:
    _, expected = train(run_config, 1, 2)
    _, found = train(run_config, 2, 2)
    assert [(step.loss, step.metrics) for step in found] == [(step.loss, step.metrics) for step in expected]


def test_every_layout_gives_the_sums_of_one_process_and_takes_an_own_optimizer():
    on_ranks(2, every_layout)


@pytest.mark.parametrize("name", ["tensor", "context"])
def test_a_layout_outside_works_with_is_refused(name: str):
    with pytest.raises(ConfigError, match=rf"ByRow works with data and pipeline parallelism.*parallel\.{name} is 2"):
        config({name: 2}, objective={"kind": f"{OWN}:ByRow"})
    config({"pipeline": 2}, objective={"kind": f"{OWN}:ByRow"})


@pytest.mark.parametrize(("sums", "message"), [
    (lambda: torch.zeros(()), "which is not tw.Sums"),
    (lambda: tw.Sums(torch.zeros(3), {"accuracy": torch.zeros(()), "cross_entropy": torch.zeros(())}), "scalar"),
    (lambda: tw.Sums(torch.zeros(()), {"accuracy": 0.5, "cross_entropy": torch.zeros(())}), "accuracy is float"),
    (lambda: tw.Sums(torch.zeros(()), {"accurazy": torch.zeros(())}), "METRICS names"),
])
def test_the_result_of_an_objective_is_checked(monkeypatch: pytest.MonkeyPatch, sums, message: str):
    monkeypatch.setattr(LabelSmoothing, "sums", lambda self, outputs, batch: sums())
    with pytest.raises(ConfigError, match=message):
        train(config({}, objective=SMOOTH), 1, 1)


def test_configurations_may_name_the_objective_loss():
    former = build(TrainConfig, {"loss": {"z_loss": 1e-4}}, ["loss.chunk_tokens=8"])
    assert former == build(TrainConfig, {"objective": {"z_loss": 1e-4, "chunk_tokens": 8}})
    assert former.objective == tw.objectives.NextToken(z_loss=1e-4, chunk_tokens=8)
    assert former.recipe_hash() == build(TrainConfig, {"loss": {"z_loss": 1e-4}}).recipe_hash() == "922ce67224f179e6"
    assert build(TrainConfig, {"objective": {"z_loss": 1e-3}}, ["loss.z_loss=1e-4"]).objective.z_loss == 1e-4


def test_the_planner_counts_whole_logits_of_an_own_objective():
    layout = SimpleNamespace(parallel=SimpleNamespace(tensor=1))
    own = Job(build(TrainConfig, {"objective": SMOOTH}), 128_000, 8192)
    built_in = Job(build(TrainConfig, {}), 128_000, 8192)
    assert logit_rows(own, layout, 32_768) == 32_768  # type: ignore[arg-type]
    assert logit_rows(built_in, layout, 32_768) == 8192  # type: ignore[arg-type]


def test_an_objectives_metrics_are_among_the_runs(tmp_path: Path):
    write_shards(tmp_path / "shards")
    write_shards(tmp_path / "validation", rows=4, seed=1)
    settings = run_config(tmp_path, "smooth", "steps=2", f"objective.kind={SMOOTH['kind']}")
    result = fit_local(settings)
    lines = [json.loads(line) for line in (tmp_path / "runs/smooth/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [set(line["objective"]) for line in steps] == [{"accuracy", "cross_entropy"}] * 2
    assert steps[0]["objective"]["cross_entropy"] != steps[0]["loss"]
    assert 0 <= steps[0]["objective"]["accuracy"] <= 1
    assert "objective/accuracy" in scalars(steps[0])
    assert result.validation_loss is not None, "validation is the cross-entropy"
    run = json.loads((tmp_path / "runs/smooth/run.json").read_text())
    assert set(run["code"]) == {"objective"}
