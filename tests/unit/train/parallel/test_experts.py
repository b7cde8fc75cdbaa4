"""A mixture of experts under every layout trains as in one process: losses, parameters, counts and biases."""

from __future__ import annotations

from typing import Any

import torch

from tests.every import every
from tests.ranks import on_ranks
from tests.unit.train.parallel.layouts import LENGTH, ROWS, assert_same_training, config, micro_batches, train
from tidewheel.models.moe.router import Router
from tidewheel.plan.activations import product_names as planned_names
from tidewheel.train.config import TrainConfig
from tidewheel.train.memory.activations import product_names
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.step import StepResult

MODEL = {"kind": "mixtral", "ffn_dim": 64, "num_experts": 4, "experts_per_token": 2, "balancing": "bias",
         "balancing_rate": 0.01, "router_z_loss": 0.01}
AUXILIARY = {**MODEL, "balancing": "auxiliary", "auxiliary_loss": 0.5}
DEEPSEEK_LIKE = {**MODEL, "shared_experts": 1, "first_dense_layers": 1, "expert_ffn_dim": 32}
LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"data": "ddp"}, AUXILIARY), ({"data": "zero2"}, DEEPSEEK_LIKE), ({"tensor": 2}, AUXILIARY),
    ({"tensor": 2}, DEEPSEEK_LIKE), ({"context": 2}, AUXILIARY), ({"pipeline": 2}, AUXILIARY)]


def check_layouts() -> None:
    for parallel_values, settings in LAYOUTS:
        model = assert_same_training(config(parallel_values, model=settings), steps=2)
        for _, bias in model.named_buffers():
            assert bool(bias.any()) == (settings["balancing"] == "bias"), parallel_values


def test_layouts_train_alike():
    on_ranks(2, check_layouts)


def one_process(**changes: Any) -> tuple[ParallelModel, list[StepResult]]:
    return train(config({}, **changes), 1, 2)


def test_products_of_experts_are_known_to_selective_checkpointing():
    model = config({}, model=MODEL).model
    assert product_names(model) == tuple(planned_names(model))
    assert product_names(model)[-3:] == ("ffn.experts.w1", "ffn.experts.w3", "ffn.experts.w2")


KINDS = ("full", "selective", "feed_forward", "attention", "every_nth")


@every([*({"activation_checkpointing": kind} for kind in KINDS),
        {"activation_checkpointing": "selective", "keep_products": ["experts.w2", "wo"]}])
def test_counts_do_not_depend_on_activation_checkpointing(memory: dict[str, Any]) -> None:
    model = {**MODEL, "balancing": "auxiliary"}
    _, expected = one_process(model=model)
    _, results = one_process(model=model, memory=memory)
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.experts == theirs.experts
        assert ours.gradient_norm == theirs.gradient_norm


def test_the_bias_of_every_layer_moves_against_its_load():
    model, results = train(config({}, model={**MODEL, "num_layers": 4, "first_dense_layers": 1}), 1, 1)
    load = results[0].experts
    assert list(load) == [1, 2, 3]
    assert all(sum(layer.counts) == ROWS * LENGTH * 2 for layer in load.values())
    for layer, router in enumerate([module for module in model.parts[0].modules() if isinstance(module, Router)], 1):
        counts = torch.tensor(load[layer].counts, dtype=torch.float64)
        step = torch.sign(counts.mean() - counts) * 0.01
        torch.testing.assert_close(router.selection_bias, (step - step.mean()).float())


def test_experts_without_tokens_get_zeros_and_decay():
    wanted = config({}, model={**MODEL, "balancing": "none"}, optimizer={"learning_rate": 0.1, "weight_decay": 0.5})
    untrained, _ = train(wanted, 1, 0)
    names = [name for name, _ in untrained.named_parameters() if name.endswith("experts.w1")]
    model = with_idle_expert(wanted)
    before = dict(untrained.named_parameters())
    for name, parameter in model.named_parameters():
        if name in names:
            assert torch.equal(parameter.grad[3], torch.zeros_like(parameter.grad[3]))
            torch.testing.assert_close(parameter[3], before[name][3] * (1 - 0.1 * 0.5))
            assert not torch.allclose(parameter[0], before[name][0] * (1 - 0.1 * 0.5))


def test_flops_count_the_experts_of_a_token_and_not_all():
    few, many = (config({}, model={**MODEL, "num_experts": number}).model for number in (4, 16))
    router = 6 * few.num_layers * few.dim * (16 - 4)
    assert many.flops_per_token(96, 32) - few.flops_per_token(96, 32) == router
    dense = config({}, model={"ffn_dim": 128, "qk_norm": False}).model
    assert few.flops_per_token(96, 32) - dense.flops_per_token(96, 32) == 6 * few.num_layers * few.dim * 4
    assert many.parameters(96) - few.parameters(96) == few.num_layers * few.dim * 12 * (3 * 64 + 1)


def with_idle_expert(wanted: TrainConfig) -> ParallelModel:
    """Train one step with a bias that keeps all tokens from the last expert."""
    from tidewheel.train import parallel
    from tidewheel.train.collectives import Collectives
    from tidewheel.train.optim.build import build_optimizer
    from tidewheel.train.runtime import Runtime
    from tidewheel.train.step import train_step

    model = parallel.build(wanted, 96, Runtime())
    parallel.init_weights(model, seed=3)
    for _, bias in model.named_buffers():
        bias[3] = -100.0
    result = train_step(model, build_optimizer(model, wanted.optimizer), micro_batches(0), Collectives(Runtime()),
                        virtual_ranks=4)
    assert all(load.counts[3] == 0 for load in result.experts.values())
    return model
