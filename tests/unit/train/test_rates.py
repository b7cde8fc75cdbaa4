"""Tests of learning rates that follow the batch, and that are lowered after a rollback, in a branch too."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.train.helpers import config, write_shards
from tests.unit.train.test_bad_steps import BASE, log, plant, sequences, stopped, weights
from tidewheel.config import build
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import ConfigError
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig
from tidewheel.train.rates import Rates

FLAT = {"kind": "constant", "warmup_steps": 0}
SIXTEEN = {"global_sequences": 16, "micro_sequences": 2, "virtual_ranks": 4}


def rates(values: dict[str, Any], steps: int = 8, rollbacks: tuple[int, ...] = ()) -> list[float]:
    settings = build(TrainConfig, {"schedule": FLAT, "optimizer": {"learning_rate": 1.0}, "steps": steps, **values})
    made = Rates(settings, 16)
    made.lower_after(rollbacks)
    return [made.of(step) for step in range(1, steps + 1)]


def test_the_rate_follows_the_batch_by_its_rule():
    assert rates({"batch": SIXTEEN}) == [1.0] * 8
    assert rates({"batch": {**SIXTEEN, "rate_rule": "linear", "rate_sequences": 64}}) == [0.25] * 8
    assert rates({"batch": {**SIXTEEN, "rate_rule": "sqrt", "rate_sequences": 64}}) == [0.5] * 8
    ramp = {**SIXTEEN, "ramp": [{"sequences": 8, "tokens": 3 * 8 * 16}]}
    assert rates({"batch": {**ramp, "rate_rule": "linear", "rate_sequences": 16}}, 5) == [0.5] * 3 + [1.0] * 2


def test_rollbacks_lower_the_rate_for_some_steps_each():
    guards = {"spike": "rollback", "rollback_rate": 0.5, "rollback_rate_steps": 3}
    assert rates({"guards": guards}, rollbacks=(2,)) == [1, 1, 0.5, 0.5, 0.5, 1, 1, 1]
    assert rates({"guards": guards}, rollbacks=(2, 4)) == [1, 1, 0.5, 0.5, 0.25, 0.5, 0.5, 1]


@pytest.mark.parametrize(("values", "message"), [
    ({"batch": {"rate_rule": "sqrt"}}, "give its sequences in rate_sequences"),
    ({"batch": {"rate_sequences": 64}}, "without a rule"),
    ({"batch": {"rate_rule": "cubic", "rate_sequences": 64}}, "'none', 'linear' or 'sqrt'"),
    ({"guards": {"spike": "rollback", "rollback_rate": 0.5}}, "changes nothing"),
    ({"guards": {"spike": "rollback", "rollback_rate_steps": 5}}, "changes nothing"),
    ({"guards": {"rollback_rate": 0.5, "rollback_rate_steps": 5}}, "no policy rolls back"),
    ({"guards": {"spike": "rollback", "rollback_rate": 1.5, "rollback_rate_steps": 5}}, "less than or equal to 1")])
def test_rules_without_effect_are_refused(values: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        build(TrainConfig, values)


def test_a_run_lowers_its_rate_after_a_rollback_whatever_happens_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_shards(tmp_path / "shards", rows=60)
    plant({sequences(tmp_path, 6)[2]: "nan"}, monkeypatch)
    lowers = (*BASE, "schedule.kind=constant", "guards.non_finite=rollback", "guards.rollback_rate=0.5",
              "guards.rollback_rate_steps=5", "checkpoint.keep_last=9", "evaluation.every_steps=0",
              "reproducible=true")
    whole, killed = config(tmp_path, "whole", *lowers), config(tmp_path, "killed", *lowers)
    fit_local(whole)
    found = {line["step"]: line["learning_rate"] for line in log(whole, "metrics.jsonl") if "loss" in line}
    assert [step for step, rate in found.items() if step > 2 and rate == pytest.approx(1.5e-3)] == [5, 6, 7, 8, 9]
    stopped(killed, after=7)
    fit_local(killed)
    branch = config(tmp_path, "branch", *lowers, "run.branch=whole@8")
    fit_local(branch)
    assert log(branch, "passed_over.jsonl") == log(whole, "passed_over.jsonl")
    for other in (killed, branch):
        mine = {line["step"]: line["loss"] for line in log(other, "metrics.jsonl") if "loss" in line}
        theirs = {line["step"]: line["loss"] for line in log(whole, "metrics.jsonl") if "loss" in line}
        assert mine == {step: loss for step, loss in theirs.items() if step in mine}
        for name, value in weights(whole).items():
            assert (weights(other)[name] == value).all(), name
        assert audit(other.run_uri).ok
