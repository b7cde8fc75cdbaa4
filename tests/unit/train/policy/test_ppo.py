"""Tests of PPO's training step: its loss by brute force, and the same result on every number of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.unit.train.parallel.layouts import VOCABULARY, config, micro_batches, whole_values
from tests.unit.train.reproducible.test_ranks import digest
from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.models.loss import IGNORED
from tidewheel.train import parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.objective import Outputs
from tidewheel.train.objectives import PPO
from tidewheel.train.optim.build import build_optimizer, training_state
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.reproducible.kernels import deterministic_kernels
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import MicroBatch, RolloutColumns, StepResult, train_step


def rollout(micro: MicroBatch) -> MicroBatch:
    """Return a micro-batch with columns of rollouts, which depend on its tokens alone."""
    generator = torch.Generator().manual_seed(int(micro.tokens.sum()))
    sampled, advantages, values, returns = torch.randn(4, *micro.tokens.shape, generator=generator)
    return replace(micro, rollouts=RolloutColumns(sampled / 5 - 4.5, advantages, None, values / 4, returns))


def test_the_loss_is_ppos():
    torch.manual_seed(0)
    micro = rollout(micro_batches(0)[0])
    hidden, weight = torch.randn(*micro.tokens.shape, 8), torch.randn(VOCABULARY, 8) / 8
    values = (torch.randn(micro.tokens.shape) / 2).requires_grad_()
    hidden.requires_grad_()
    part = PPO(value_weight=0.3, value_clip=0.2)
    found = part.sums(Outputs(hidden, lambda x: x @ weight.T, values), micro)
    ours = torch.autograd.grad(found.loss / part.count(micro), (hidden, values))

    rows = micro.rollouts
    assert rows is not None
    assert rows.values is not None
    assert rows.returns is not None
    known = micro.targets != IGNORED
    hidden64, values64 = (tensor.detach().double().requires_grad_() for tensor in (hidden, values))
    log_p = (hidden64 @ weight.double().T).log_softmax(-1).gather(-1, micro.targets.clamp(min=0)[..., None])[..., 0]
    ratio = (log_p - rows.sampled.double()).exp()
    policy = -torch.minimum(ratio * rows.advantages, ratio.clamp(0.8, 1.2) * rows.advantages)[known].mean()
    kept = torch.minimum(torch.maximum(values64, rows.values - 0.2), rows.values + 0.2)
    value = 0.5 * torch.maximum((values64 - rows.returns) ** 2, (kept - rows.returns) ** 2)[known].mean()
    loss = policy + 0.3 * value
    theirs = torch.autograd.grad(loss, (hidden64, values64))
    count = part.count(micro)
    assert abs(found.loss.item() / count - loss.item()) < 1e-6
    for mine, other in zip(ours, theirs):
        assert (mine - other).norm() / other.norm() < 1e-6
    assert abs(found.metrics["value_loss"].item() / count - value.item()) < 1e-6
    assert 0.1 < found.metrics["value_clipped"].item() / count < 0.9, "clipping is tested"
    assert 0.1 < found.metrics["clipped"].item() / count < 0.9


def test_rollouts_without_values_are_refused():
    micro = rollout(micro_batches(0)[0])
    assert micro.rollouts is not None
    without = replace(micro, rollouts=replace(micro.rollouts, values=None))
    zeros = torch.zeros(*micro.tokens.shape, 8)
    with pytest.raises(ConfigError, match="the rollouts have no values"):
        PPO().sums(Outputs(zeros, lambda x: x, zeros[..., 0]), without)
    with pytest.raises(ConfigError, match="no log-probabilities under a reference model"):
        PPO(reference_weight=0.1).sums(Outputs(zeros, lambda x: x, zeros[..., 0]), micro)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"objective": {"kind": "ppo"}, "rollouts": {}}, "objective.kind ppo with advantage gae"),
    ({"objective": {"kind": "grpo"}, "rollouts": {"advantage": "gae"}}, "objective.kind ppo with advantage gae"),
    ({"objective": {"kind": "ppo"}, "adapter": {"kind": "lora"}}, "nearest legal choice: no adapter"),
    ({"objective": {"kind": "ppo"}, "parallel": {"tensor": 2}}, "nearest legal choice: parallel.tensor 1"),
    ({"objective": {"kind": "on_policy_distillation"}, "rollouts": {}}, "set objective.teacher")]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_what_does_not_fit_is_refused(values: dict[str, Any], message: str):
    if "rollouts" in values:
        values = {**values, "rollouts": {"prompts": "p", "reward": {"kind": "gsm8k"}, **values["rollouts"]},
                  "batch": {"global_sequences": 32}}
    with pytest.raises(ConfigError, match=message):
        build(TrainConfig, values)


def train(wanted: TrainConfig, world_size: int) -> tuple[ParallelModel, list[StepResult], dict[str, Any]]:
    runtime = Runtime(dist.get_rank() if world_size > 1 else 0, world_size)
    model = parallel.build(wanted, VOCABULARY, runtime)
    parallel.init_weights(model, seed=3)
    optimizer, collectives = build_optimizer(model, wanted.optimizer), Collectives(runtime)
    results = []
    for step in range(2):
        every = micro_batches(step)
        micros = [rollout(every[index]) for index in model.share.of(len(every))]
        results.append(train_step(model, optimizer, micros, collectives, virtual_ranks=4, clip_norm=0.5))
    return model, results, training_state(model, optimizer)


OBJECTIVE = {"kind": "ppo", "chunk_tokens": 16}
TIED = {"model": {"tie_embeddings": True}}


def every_layout() -> None:
    for changes, layout in (({}, {"data": "zero3"}), (TIED, {"data": "zero3"}), ({}, {"pipeline": 2})):
        alone, expected, _ = train(config({}, objective=OBJECTIVE, **changes), 1)
        model, found, _ = train(config(layout, objective=OBJECTIVE, **changes), 2)
        for ours, theirs in zip(found, expected):
            assert abs(ours.loss / theirs.loss - 1) < 1e-5, layout
            assert abs(ours.gradient_norm / theirs.gradient_norm - 1) < 1e-4, layout
            assert abs(ours.metrics["value"] - theirs.metrics["value"]) < 1e-6, layout
        values, expected_values = whole_values(model), whole_values(alone)
        assert expected_values["value_head.weight"].abs().max() > 0, "it learns"
        if "pipeline" not in layout or dist.get_rank() == 1:
            assert "value_head.weight" in values
        for name, value in values.items():
            assert (value - expected_values[name]).abs().max() < 1e-4, f"{layout}: {name}"


def same_bits() -> None:
    bits = []
    with deterministic_kernels():
        for ranks, layout in ((1, {}), (2, {"data": "ddp"}), (2, {"data": "zero3", "reduce": "micro_batch"})):
            _, results, state = train(config(layout, objective=OBJECTIVE, reproducible=True), ranks)
            bits.append([[(result.loss.hex(), result.gradient_norm.hex()) for result in results], digest(state)])
    if dist.get_rank() == 0:
        assert bits[0] == bits[1] == bits[2]


@pytest.mark.long
def test_every_layout_trains_the_value_head_alike():
    on_ranks(2, every_layout)


@pytest.mark.long
def test_every_number_of_ranks_has_the_same_bits():
    on_ranks(2, same_bits)
