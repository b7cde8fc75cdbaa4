"""Tests of preference losses: TRL's values, gradients and metrics, and settings that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.every import every
from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.models.loss import IGNORED
from tidewheel.plan.layout import Job
from tidewheel.train import objectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.objective import Outputs
from tidewheel.train.preferences import losses
from tidewheel.train.preferences.log_probabilities import token_log_probabilities
from tidewheel.train.preferences.objective import PairObjective


def test_every_loss_equals_trls():
    pytest.importorskip("trl")
    from tests.unit.train.preferences.oracle import TABLE, compare

    found = {row.name: compare(row) for row in TABLE}
    wrong = {name: compared for name, compared in found.items() if compared.worst >= 1e-6}
    assert not wrong
    assert {row.kind for row in TABLE} == {name for name in objectives.KIND.built_in()
                                           if issubclass(objectives.KIND.find(name), PairObjective)}
    assert {row.settings["loss"] for row in TABLE if row.kind == "dpo"} == set(losses.WITH_REFERENCE)
    assert found["kto loss=kto undesirable_weight=1.5"].metrics["kl"] > 0.1
    assert 0 < found["dpo loss=sigmoid"].metrics["accuracies"] < 1
    assert len({round(compared.loss, 4) for compared in found.values()}) == len(found), "the losses differ"


def test_the_oracle_notices_a_small_change(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("trl")
    from tests.unit.train.preferences import oracle

    real = losses.smoothed
    monkeypatch.setattr(losses, "smoothed", lambda difference, smoothing: real(difference * 1.0001, smoothing))
    assert oracle.compare(oracle.TABLE[0]).worst > 1e-5


def test_labels_that_are_wrong_half_of_the_time_give_no_direction():
    ratios = torch.tensor([0.3, -2.0], requires_grad=True)
    losses.smoothed(ratios, 0.5).sum().backward()
    assert ratios.grad is not None
    assert torch.allclose(ratios.grad, torch.sigmoid(ratios.detach()) - 0.5)
    assert torch.equal(losses.smoothed(torch.zeros(1), 0.3), losses.smoothed(torch.zeros(1), 0.0))


@every([0, 1, 5, 8, 64])
def test_chunks_give_the_same_log_probabilities_and_gradients(chunk: int):
    torch.manual_seed(0)
    weight, hidden = torch.randn(20, 6, requires_grad=True), torch.randn(4, 8, 6, requires_grad=True)
    targets = torch.randint(0, 20, (4, 8)).masked_fill(torch.rand(4, 8) < 0.5, IGNORED)
    expected = (hidden @ weight.T).log_softmax(-1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
    expected = expected.masked_fill(targets == IGNORED, 0.0)
    factors = torch.randn(4, 8)
    wanted = torch.autograd.grad((expected * factors).sum(), (weight, hidden))
    outputs = Outputs(hidden, lambda x: x @ weight.T)
    for known in (None, int((targets != IGNORED).sum())):
        found = token_log_probabilities(outputs, targets, chunk, known)
        assert torch.allclose(found, expected, atol=1e-6)
        gradients = torch.autograd.grad((found * factors).sum(), (weight, hidden))
        assert all(torch.allclose(ours, theirs, atol=1e-5) for ours, theirs in zip(gradients, wanted))


def test_the_odds_ratio_is_precise_near_certainty():
    chosen = torch.tensor([-1e-6, -0.5, -0.9, -30.0], dtype=torch.float64)
    exact = losses.log_odds_ratio(chosen, torch.full_like(chosen, -1.0))
    close = losses.log_odds_ratio(chosen.float(), torch.full((4,), -1.0))
    assert torch.allclose(close.double(), exact, rtol=1e-6)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kind": "dpo", "loss": "exo_pair"}, "exo_pair with label_smoothing 0"),
    ({"kind": "dpo", "loss": "hinge", "label_smoothing": 0.1}, "no effect on hinge"),
    ({"kind": "dpo", "divergence": "alpha", "alpha": 1}, "nearest legal choice: divergence reverse_kl"),
    ({"kind": "dpo", "loss": "sigmoyd"}, "sigmoid"),
    ({"kind": "cpo", "loss": "ipo", "label_smoothing": 0.1}, "no effect on ipo"),
    ({"kind": "reward_model", "head": "process"}, "step_token says where steps end"),
    ({"kind": "reward_model", "step_token": 3}, "step_token says where steps end")]


@every(REFUSED)
def test_settings_without_effect_are_refused(case: tuple[dict[str, Any], str]):
    settings, message = case
    with pytest.raises(ConfigError, match=message):
        build(TrainConfig, {"objective": settings})


@every([("dpo", "context"), ("orpo", "context"), ("reward_model", "tensor"), ("reward_model", "context")])
def test_layouts_that_split_sequences_or_the_head_are_refused(case: tuple[str, str]):
    kind, dimension = case
    with pytest.raises(ConfigError, match=rf"nearest legal choice: parallel\.{dimension} 1"):
        build(TrainConfig, {"objective": kind, "parallel": {dimension: 2}, "elastic": {"max_workers": 4}})


def test_the_planner_counts_both_sequences_of_a_pair():
    packed, pairs = (Job(build(TrainConfig, {"objective": kind}), 128, 64) for kind in ("next_token", "dpo"))
    mismatched = Job(build(TrainConfig, {"objective": "kto"}), 128, 64)
    assert [job.row_tokens for job in (packed, pairs, mismatched)] == [64, 128, 192]
