"""Tests of policy-gradient losses: TRL's values, gradients and entropies, and settings that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.every import every
from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.train import objectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.policy import surrogates
from tidewheel.train.policy.objective import PolicyObjective


def test_every_loss_equals_trls():
    pytest.importorskip("trl")
    from tests.unit.train.policy.oracle import TABLE, compare

    found = {row.name: compare(row) for row in TABLE}
    # TRL adds the log-probabilities of an answer before it subtracts, which rounds RLOO's ratio
    wrong = {name: compared for name, compared in found.items() if compared.worst >= (5e-6 if name == "rloo" else 1e-6)}
    assert not wrong
    assert {row.kind for row in TABLE} | {"ppo"} == {name for name in objectives.KIND.built_in()
                                           if issubclass(objectives.KIND.find(name), PolicyObjective)}
    assert len({round(compared.loss, 5) for compared in found.values()}) >= len(found) - 2, "the losses differ"


def test_each_step_of_several_passes_over_a_wave_equals_trls():
    pytest.importorskip("trl")
    from tests.unit.train.policy.oracle import Row, several_steps

    gspo = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
    for kind, trl, learning_rate in (("grpo", {"epsilon_high": 0.2}, 8e-3), ("gspo", gspo, 6e-6)):
        steps = several_steps(Row(kind, {"loss_type": "grpo", **trl}, {}), learning_rate, epochs=3, minibatches=2)
        assert len(steps) == 6
        assert all(loss < 1e-6 and gradient < 1e-6 for loss, gradient, _ in steps)
        clipped = [share for _, _, share in steps]
        assert clipped[0] == 0, "the first step trains the policy that sampled"
        assert 0.4 < max(clipped) < 1


def test_the_oracle_notices_a_small_change(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("trl")
    from tests.unit.train.policy import oracle

    real = surrogates.clipped
    monkeypatch.setattr(surrogates, "clipped", lambda log_ratio, *rest: real(log_ratio * 1.0001, *rest))
    assert oracle.compare(oracle.TABLE[0]).worst > 1e-6


def test_clipping_is_counted_where_there_is_no_gradient():
    log_ratio = torch.tensor([[-1.0, -0.1, 0.0, 0.1, 1.0]] * 2, requires_grad=True)
    advantages = torch.tensor([[1.0], [-1.0]])
    surrogates.clipped(log_ratio, advantages, 0.2, 0.28).sum().backward()
    assert log_ratio.grad is not None
    assert torch.equal(log_ratio.grad == 0, surrogates.is_clipped(log_ratio, advantages, 0.2, 0.28))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kind": "grpo", "average": "constant"}, "set it to the most tokens of an answer"),
    ({"kind": "grpo", "answer_tokens": 5}, "no effect on average sequences"),
    ({"kind": "dr_grpo", "answer_tokens": 0}, "set it to the most tokens of an answer"),
    ({"kind": "grpo", "most_ratio": 0.5}, "nearest legal choice: 2"),
    ({"kind": "grpo", "mask_ratio": 1.0}, "nearest legal choice: 2"),
    ({"kind": "grpo", "correction_bound": 2.0}, "nearest legal choice: correction truncated"),
    ({"kind": "gspo", "ratio": "sequences"}, "sequence")]


@every(REFUSED)
def test_settings_without_effect_are_refused(case: tuple[dict[str, Any], str]):
    settings, message = case
    with pytest.raises(ConfigError, match=message):
        build(TrainConfig, {"objective": settings})
