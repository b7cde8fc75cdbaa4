"""Each part of training gives the numbers that were recorded for its version, for a fixed input."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.golden import training
from tests.golden.compare import training_problem
from tidewheel.config import build
from tidewheel.models import families, loss
from tidewheel.models.blocks import norms
from tidewheel.train import objectives, optimizers
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim import base
from tidewheel.train.optim.schedule import Schedule
from tidewheel.train.optimizers.rules import lion


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads(training.RECORDED.read_text())


@pytest.mark.parametrize("name", training.names())
def test_every_part_gives_what_its_version_promises(name: str, recorded: dict[str, Any]):
    assert training_problem(name, training.run(name), recorded) == ""


def test_every_recorded_part_still_exists(recorded: dict[str, Any]):
    assert sorted(recorded) == sorted(training.names())


@pytest.mark.parametrize("kind", training.KINDS, ids=lambda kind: kind.noun)
def test_every_part_declares_a_version_of_its_own(kind: Any):
    declared = [vars(kind.find(name)).get("VERSION") for name in kind.built_in()]
    assert None not in declared
    assert len({version.part for version in declared}) == len(declared)
    assert all(kind.base.VERSION is None or kind.base.VERSION.part in version.numbers() for version in declared)


@pytest.mark.parametrize("name", training.names())
def test_the_number_of_threads_changes_no_output(name: str):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single_thread = training.run(name)
        torch.set_num_threads(2)
        assert training.different(training.run(name).rows, single_thread.rows, single_thread.tolerance / 10) == ""
    finally:
        torch.set_num_threads(threads)


def _adamw_with_epsilon_under_the_root(self: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    class Other(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                (beta1, beta2), rate = group["betas"], group["lr"]
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state["step"] += 1
                    count = state["step"].item()
                    state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
                    state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                    parameter.mul_(1 - rate * group["weight_decay"])
                    root = (state["exp_avg_sq"] / (1 - beta2**count) + group["eps"] * self.inside).sqrt()
                    root = root if self.inside else root + group["eps"]
                    parameter.sub_(rate * state["exp_avg"] / (1 - beta1**count) / root)

    other = Other(groups, lr=self.learning_rate, betas=self.betas, eps=self.epsilon)
    other.inside = self.__class__.inside  # type: ignore[attr-defined]
    return other


def _norm_with_epsilon_outside(self: Any, x: torch.Tensor) -> torch.Tensor:
    root = x.float().square().mean(-1, keepdim=True).sqrt() + self.epsilon * 100
    return (x.float() / root * self.weight).to(x.dtype)


def _smooth_sign(tensors: list[torch.Tensor]) -> None:
    torch._foreach_tanh_(tensors)


def _squared_once(logits: torch.Tensor, targets: torch.Tensor, z_loss: float = 0.0) -> torch.Tensor:
    plain = F.cross_entropy(logits.float(), targets, ignore_index=-100, reduction="sum")
    penalty = z_loss * logits.float().logsumexp(-1).abs().masked_fill(targets == -100, 0.0).sum()
    return plain + penalty - penalty.detach()


def _late_warmup(self: Schedule, done: int, total: int, peak: float) -> float:
    start = self.warmup_end(total)
    return peak * done / (start + 1) if done <= start else peak * self.factor(done, total, start)


def _part(kind: Any, name: str) -> Any:
    return kind.find(name)


def _change_muon(patch: pytest.MonkeyPatch) -> None:
    before = torch.optim.Muon.__init__.__defaults__ or ()
    after = tuple((3.0, -4.0, 2.0) if isinstance(value, tuple) else value for value in before)
    patch.setattr(torch.optim.Muon.__init__, "__defaults__", after)


CHANGES: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "epsilon under the root": ("optimizer adamw", lambda patch: (
        patch.setattr(_part(optimizers.KIND, "adamw"), "inside", True, raising=False),
        patch.setattr(_part(optimizers.KIND, "adamw"), "build", _adamw_with_epsilon_under_the_root))),
    "decay of the embedding": ("optimizer lion", lambda patch: patch.setattr(
        base, "decays", lambda name, parameter: parameter.ndim > 1)),
    "no sign": ("optimizer lion", lambda patch: patch.setattr(lion.torch, "_foreach_sign_", _smooth_sign)),
    "Muon's coefficients": ("optimizer muon", _change_muon),
    "a longer warm-up": ("schedule constant", lambda patch: patch.setattr(Schedule, "learning_rate", _late_warmup)),
    "another penalty": ("objective next_token", lambda patch: patch.setattr(loss, "cross_entropy", _squared_once)),
    "another epsilon in norms": ("model family llama", lambda patch: patch.setattr(
        norms.RMSNorm, "forward", _norm_with_epsilon_outside)),
    "other initial weights": ("model family llama", lambda patch: patch.setattr(
        _part(families.KIND, "llama"), "RESIDUAL_OUTPUTS", ("attention.wo.weight",))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_without_a_new_version_is_refused(change: str, recorded: dict[str, Any],
                                                   monkeypatch: pytest.MonkeyPatch):
    name, apply = CHANGES[change]
    apply(monkeypatch)
    message = training_problem(name, training.run(name), recorded)
    assert "the output" in message
    assert "raise the version" in message


def test_adamw_written_out_gives_the_recorded_numbers(recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """The changed AdamW above differs only in where it adds epsilon."""
    adamw = _part(optimizers.KIND, "adamw")
    monkeypatch.setattr(adamw, "inside", False, raising=False)
    monkeypatch.setattr(adamw, "build", _adamw_with_epsilon_under_the_root)
    assert training_problem("optimizer adamw", training.run("optimizer adamw"), recorded) == ""


def test_a_changed_default_or_recipe_hash_is_refused(recorded: dict[str, Any]):
    now = training.run("schedule wsd")
    other = replace(now, settings={**now.settings, "decay_fraction": 0.3})
    assert "defaults of schedule wsd have changed (decay_fraction)" in training_problem("schedule wsd", other, recorded)
    assert "recipe hashes" in training_problem("schedule wsd", replace(now, recipe="other"), recorded)
    raised = replace(now, versions={**now.versions, "schedule_wsd": 2})
    assert "record it with" in training_problem("schedule wsd", raised, recorded)
    assert "not recorded" in training_problem("schedule new", now, recorded)


def test_a_row_that_is_not_a_number_or_has_another_length_is_different():
    rows = {"row": [1.0, 2.0]}
    assert training.different(rows, rows, 1e-4) == ""
    assert training.different({"row": [1.0, 2.0 + 1e-6]}, rows, 1e-4) == ""
    assert training.different({"row": [1.0, math.nan]}, rows, 1e-4)
    assert training.different({"row": [1.0]}, rows, 1e-4)
    assert training.different({"other": [1.0, 2.0]}, rows, 1e-4)
    rounding = {"row": [6e-10, -3e-10]}
    assert training.different({"row": [-6e-10, 3e-10]}, rounding, 1e-4) == ""
    assert training.different({"row": [2e-8, 3e-10]}, rounding, 1e-4)
    assert training.different({"row": [6e-10, 0.0]}, {"row": [0.0, 0.0]}, 1e-4)


def test_a_raised_version_changes_the_recipe_hash(monkeypatch: pytest.MonkeyPatch):
    plain = build(TrainConfig, {})
    assert plain.versions() == {"decoder": 1, "model_llama": 1, "objective_next_token": 1, "optimizer_adamw": 1,
                                "optimizer_groups": 1, "schedule_cosine": 1, "schedule_warmup": 1, "token_loss": 1}
    before = plain.recipe_hash()
    adamw = _part(optimizers.KIND, "adamw")
    monkeypatch.setattr(adamw, "VERSION", replace(adamw.VERSION, number=2))
    assert plain.versions()["optimizer_adamw"] == 2
    assert plain.recipe_hash() != before
    lion_run = build(TrainConfig, {"optimizer": {"kind": "lion"}}).recipe_hash()
    next_token = _part(objectives.KIND, "next_token")
    monkeypatch.setattr(next_token, "VERSION", replace(next_token.VERSION, uses=()))
    assert build(TrainConfig, {"optimizer": {"kind": "lion"}}).recipe_hash() == lion_run, "only raised versions count"
