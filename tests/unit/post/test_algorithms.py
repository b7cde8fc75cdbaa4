"""Tests of runs whose generators give more than answers: values for PPO, a reference model; and of distillation."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.post.runs import inline, logged, rollout_run
from tidewheel import storage
from tidewheel.checkpoint.digest import digest
from tidewheel.elastic import trainer
from tidewheel.errors import CheckpointError
from tidewheel.inference.group import Sampling, sample_group
from tidewheel.inference.writer import Writer
from tidewheel.models.initial_values import init_parameter
from tidewheel.post import policy, token_scores
from tidewheel.post.audit import audit_rollouts
from tidewheel.shards import growing
from tidewheel.shards.rollouts import read_shard
from tidewheel.stopping import Stop, Stopped

PPO = ("objective.kind=ppo", "rollouts.advantage=gae", "rollouts.kl_weight=0.02", "rollouts.look_ahead=1", "steps=8")


@pytest.fixture(autouse=True)
def inline_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_local_pool", inline)


def objectives_of(folder: Path, run: str) -> list[dict[str, float]]:
    return [record["objective"] for record in logged(folder, run, "metrics.jsonl") if "objective" in record]


def test_ppo_learns_and_a_stopped_run_has_the_same_bits(tmp_path: Path):
    trainer.fit_local(rollout_run(tmp_path, "whole", *PPO))
    steps = objectives_of(tmp_path, "whole")
    rewards = [record["reward"] for record in logged(tmp_path, "whole", "rollouts.jsonl") if record["kind"] == "step"]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
    assert steps[0]["value"] == 0
    assert steps[-1]["value_loss"] < steps[0]["value_loss"]
    assert max(step["value_clipped"] for step in steps) > 0, "the policy that sampled was one step behind"
    assert steps[0]["gap"] == steps[0]["reference_kl"] == 0
    versions = sorted(path.name[:8] for path in (tmp_path / "runs/whole/policies").glob("*.json"))
    assert versions == ["00000000", "00000005", "00000006"], "the reference model stays"

    stop = Stop()

    def after_two(progress: dict[str, Any]) -> None:
        if progress.get("step", 0) >= 2:
            stop.requested.set()

    with pytest.raises(Stopped):
        trainer.fit_local(rollout_run(tmp_path, "stopped", *PPO), on_progress=after_two, stop=stop)
    trainer.fit_local(rollout_run(tmp_path, "stopped", *PPO))
    whole, stopped = (digest(f"{tmp_path}/runs/{run}").groups["model"] for run in ("whole", "stopped"))
    assert whole == stopped
    result = audit_rollouts(f"{tmp_path}/runs/stopped")
    assert result is not None
    assert result.ok, result.summary()
    Writer.open(f"{tmp_path}/runs/whole")  # the policy is a decoder like any other


def test_an_audit_notices_returns_that_do_not_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tidewheel.post import credit

    monkeypatch.setattr(credit, "estimated", lambda rewards, values, gamma, decay: [
        reward - value for reward, value in zip(rewards, values)])
    trainer.fit_local(rollout_run(tmp_path, "run", *PPO[:-2], "steps=1"))
    monkeypatch.undo()
    result = audit_rollouts(f"{tmp_path}/runs/run")
    assert result is not None
    assert "step 1: the returns of the tokens do not follow from the rewards" in result.mismatches


def test_a_reference_that_is_gone_is_named(tmp_path: Path):
    config = rollout_run(tmp_path, "run", "objective.reference_weight=0.1", "steps=1")
    assert config.start_is_reference
    trainer.fit_local(config)
    folder = storage.store(f"{tmp_path}/runs/run/rollouts")
    manifest = growing.read_set(folder)
    shard = read_shard(folder, manifest.shards[0], manifest)
    values, reference = shard.log_probabilities[0], shard.optional["reference"][0]
    assert len(values) == len(reference)
    assert np.abs(values - reference).max() < 1e-5, "the first step samples with the reference"
    shutil.rmtree(tmp_path / "runs/run/policies")
    with pytest.raises(CheckpointError, match="which is the reference model, is missing"):
        policy.start(storage.store(config.run_uri), 1)


def test_scores_of_a_group_are_those_of_sampling(tmp_path: Path):
    config = rollout_run(tmp_path)
    model = policy.empty(config.model, 128, values=True)
    for name, value in model.named_parameters():
        value.copy_(init_parameter(name, value.shape, config.model, 0))
    assert model.value_head is not None
    model.value_head.weight.copy_(torch.linspace(-1, 1, 32)[None])
    for precision in ("fp32", "bf16"):
        sampling = Sampling(5, temperature=0.7, stop=frozenset({0}), precision=precision)  # type: ignore[arg-type]
        group = sample_group(model, [5, 6, 7], range(4), sampling, key=1, stream=2)
        answers = [answer.tokens for answer in group]
        found = token_scores.log_probabilities(model, [5, 6, 7], answers, sampling)
        assert found == [answer.log_probabilities for answer in group], "bit for bit"
        values = token_scores.values(model, [5, 6, 7], answers, sampling)
        alone = token_scores.values(model, [5, 6, 7], answers[1:2] * 4, sampling)
        assert np.allclose(values[1], alone[0], atol=1e-5 if precision == "fp32" else 1e-2)
        assert [len(row) for row in values] == [len(answer) for answer in answers]


def test_a_student_learns_its_teachers_distribution_on_its_own_answers(tmp_path: Path):
    trainer.fit_local(rollout_run(tmp_path, "teacher", "steps=1", "seed=5"))
    config = rollout_run(tmp_path, "student", "objective={kind: on_policy_distillation, teacher: "
                         f"{tmp_path}/runs/teacher}}", "steps=4", "rollouts.temperature=0.9")
    trainer.fit_local(config)
    divergences = [step["divergence"] for step in objectives_of(tmp_path, "student")]
    assert divergences[-1] < 0.7 * divergences[0]
