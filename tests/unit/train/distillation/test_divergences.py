"""Tests of distillation's loss: TRL's, torch's own divergences, and few logits in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.every import every
from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.models.documents import Documents
from tidewheel.models.loss import IGNORED
from tidewheel.train.config import TrainConfig
from tidewheel.train.distillation.divergences import divergence, top_and_rest
from tidewheel.train.objective import Outputs, TopK
from tidewheel.train.objectives import Distillation, OnPolicyDistillation
from tidewheel.train.step import MicroBatch

VOCABULARY, WIDTH = 50, 8
KINDS: list[dict[str, Any]] = [{"divergence": "forward_kl"}, {"divergence": "reverse_kl"},
                               {"divergence": "jensen_shannon", "beta": 0.3}]


def rows(teacher: TopK | Outputs | None) -> MicroBatch:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (2, 12), generator=generator)
    targets = torch.randint(0, VOCABULARY, (2, 12), generator=generator)
    targets[torch.rand(2, 12, generator=generator) < 0.4] = IGNORED
    segments = torch.zeros_like(tokens)
    return MicroBatch(tokens, tokens, segments, targets, 0, 24, int((targets >= 0).sum()),
                      Documents.of(segments.numpy()), teacher=teacher)


def models() -> tuple[Outputs, Outputs, list[torch.Tensor]]:
    """Return the outputs of a student and of a wider teacher, and the student's tensors."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 12, WIDTH, generator=generator).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH, generator=generator) / 2).requires_grad_()
    wide, wide_weight = (torch.randn(*shape, generator=generator) for shape in ((2, 12, 16), (VOCABULARY, 16)))
    wide_weight /= 3
    return (Outputs(hidden, lambda x: F.linear(x, weight)), Outputs(wide, lambda x: F.linear(x, wide_weight)),
            [hidden, weight])


def trl_loss(student: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor, settings: dict[str, Any],
             temperature: float) -> torch.Tensor:
    """Return the sum over targets of TRL's loss, whose beta 0 and 1 are the two KL divergences."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer

    beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jensen_shannon": settings.get("beta")}[settings["divergence"]]
    loss: torch.Tensor = GKDTrainer.generalized_jsd_loss(student, teacher, targets, beta=beta, temperature=temperature,
                                                         reduction="sum")
    return loss


def torch_loss(student: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor, settings: dict[str, Any],
               temperature: float) -> torch.Tensor:
    """Return the sum over targets of torch's own divergences of the two distributions."""
    p, q = ((logits[targets >= 0].double() / temperature).softmax(dim=-1) for logits in (teacher, student))

    def kl(of: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        return F.kl_div(to.log(), of, reduction="sum")

    if settings["divergence"] == "jensen_shannon":
        mixed = settings["beta"] * p + (1 - settings["beta"]) * q
        return settings["beta"] * kl(p, mixed) + (1 - settings["beta"]) * kl(q, mixed)
    return kl(p, q) if settings["divergence"] == "forward_kl" else kl(q, p)


CASES = [(kind, temperature, chunk) for kind in KINDS for temperature, chunk in ((1.0, 0), (2.5, 5))]


@pytest.mark.long
@every(CASES)
def test_losses_and_gradients_are_trls(case: tuple[dict[str, Any], float, int]):
    compare(case, trl_loss)


@pytest.mark.long
def test_on_policy_distillation_is_trls_gkd_on_the_students_answers():
    student, teacher, tensors = models()
    objective, batch = OnPolicyDistillation(teacher="run"), rows(teacher)
    sums = objective.sums(student, batch)
    expected = trl_loss(student.logits(), teacher.logits(), batch.targets, {"divergence": "reverse_kl"}, 1.0)
    assert sums.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for ours, theirs in zip(torch.autograd.grad(sums.loss, tensors), torch.autograd.grad(expected, tensors)):
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()


@every(CASES)
def test_losses_and_gradients_are_torchs(case: tuple[dict[str, Any], float, int]):
    compare(case, torch_loss)


def compare(case: tuple[dict[str, Any], float, int], oracle: Callable[..., torch.Tensor]) -> None:
    settings, temperature, chunk = case
    student, teacher, tensors = models()
    objective = Distillation(**settings, temperature=temperature, weight=0.75, teacher="run", chunk_tokens=chunk)
    batch = rows(teacher)
    sums = objective.sums(student, batch)
    logits = student.logits()
    expected = oracle(logits, teacher.logits(), batch.targets, settings, temperature)
    cross_entropy = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
    whole = 0.25 * cross_entropy + 0.75 * temperature ** 2 * expected
    assert sums.metrics["divergence"].item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    assert sums.metrics["cross_entropy"].item() == pytest.approx(cross_entropy.item(), rel=1e-6)
    assert sums.loss.item() == pytest.approx(whole.item(), rel=1e-6, abs=1e-6)
    for ours, theirs in zip(torch.autograd.grad(sums.loss, tensors), torch.autograd.grad(whole, tensors)):
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()


@every([(kind, top_k) for kind in KINDS for top_k in (1, 7, VOCABULARY - 1)])
def test_other_tokens_count_as_one(case: tuple[dict[str, Any], int]):
    """Compare with torch's divergence of probabilities that are added up, in fp64."""
    settings, top_k = case
    student, teacher, tensors = models()
    objective = Distillation(**settings, temperature=2.0, weight=1.0, teacher="run", top_k=top_k, chunk_tokens=4)
    batch = rows(teacher)
    known = batch.targets >= 0
    logits, others = (outputs.logits()[known].double() for outputs in (student, teacher))
    top = others.topk(top_k, dim=1).indices

    def buckets(values: torch.Tensor) -> torch.Tensor:
        chances = (values / 2.0).softmax(dim=1)
        chosen = chances.gather(1, top)
        return torch.cat((chosen, chances.scatter(1, top, 0.0).sum(dim=1, keepdim=True)), dim=1)

    p, q = buckets(others), buckets(logits)

    def kl(of: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        return F.kl_div(to.log(), of, reduction="sum")

    mixed = 0.3 * p + 0.7 * q
    expected = {"forward_kl": kl(p, q), "reverse_kl": kl(q, p),
                "jensen_shannon": 0.3 * kl(p, mixed) + 0.7 * kl(q, mixed)}[settings["divergence"]]
    gradients = torch.autograd.grad(4 * expected, tensors)
    live = objective.sums(student, batch)
    log_probabilities = top_and_rest(teacher.logits().flatten(0, 1), teacher.logits().topk(top_k).indices.flatten(0, 1),
                                     2.0)
    stored = TopK(teacher.logits().topk(top_k).indices, log_probabilities.view(2, 12, -1))
    from_files = Distillation(**settings, temperature=2.0, weight=1.0).sums(student, rows(stored))
    for found in (live, from_files):
        assert found.loss.item() == pytest.approx(4 * expected.item(), rel=2e-6)
        for ours, theirs in zip(torch.autograd.grad(found.loss, tensors), gradients):
            assert (ours - theirs).norm() < 2e-6 * theirs.norm()


def test_the_bucket_of_other_tokens_is_precise_when_it_is_empty():
    logits = torch.zeros(1, 10)
    logits[0, 3] = 40.0
    top = torch.tensor([[3]])
    exact = top_and_rest(logits.double(), top, 1.0)
    assert exact[0, 1].item() == pytest.approx(torch.tensor(9.0).log().item() - 40, rel=1e-6)
    found = logits.clone().requires_grad_()
    value = divergence(top_and_rest(found, top, 1.0), top_and_rest(torch.randn(1, 10), top, 1.0), "reverse_kl")
    value.sum().backward()
    assert found.grad is not None
    assert found.grad.isfinite().all()


class Counted:
    """An output layer that records the largest number of logits asked for at once."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.most = weight, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.most = max(self.most, x.numel() // x.shape[-1])
        return F.linear(x, self.weight)


def test_few_logits_of_both_models_are_in_memory():
    student, teacher, tensors = models()
    counted = [Counted(tensors[1]), Counted(torch.randn(VOCABULARY, 16))]
    batch = rows(Outputs(teacher.hidden, counted[1]))
    sums = Distillation(teacher="run", chunk_tokens=4).sums(Outputs(student.hidden, counted[0]), batch)
    sums.loss.backward()
    assert [layer.most for layer in counted] == [4, 4]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"top_k": 8}, "top_k is of a live teacher"), ({"weight": 0}, "greater than 0"), ({"beta": 1}, "less than 1"),
    ({"divergence": "forwrd_kl"}, "forward_kl"), ({"temperature": 0}, "greater than 0")]


@every(REFUSED)
def test_settings_without_effect_are_refused(case: tuple[dict[str, Any], str]):
    settings, message = case
    with pytest.raises(ConfigError, match=message):
        build(TrainConfig, {"objective": {"kind": "distillation", **settings}})
