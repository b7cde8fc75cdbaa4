"""Ranks that share experts train as one process does: losses, norms, parameters and loads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.unit.train.parallel.layouts import (
    VOCABULARY,
    config,
    micro_batches,
    train,
    whole,
    whole_values,
)
from tidewheel.models.initial_values import init_parameter
from tidewheel.train import parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.optim.build import build_optimizer
from tidewheel.train.parallel import local
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import train_step

MODEL = {"kind": "mixtral", "ffn_dim": 64, "num_experts": 4, "experts_per_token": 2, "balancing": "bias",
         "balancing_rate": 0.01, "router_z_loss": 0.01}
AUXILIARY = {**MODEL, "balancing": "auxiliary", "auxiliary_loss": 0.5}
SHARED = {**AUXILIARY, "shared_experts": 1, "first_dense_layers": 1, "expert_ffn_dim": 32}
FULL = {"memory": {"activation_checkpointing": "full"}}
SELECTIVE = {"memory": {"activation_checkpointing": "selective"}}
LAYOUTS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"data": "zero3", "expert": 2, "reduce": "micro_batch"}, AUXILIARY, FULL),
    ({"context": 2, "expert": 4}, MODEL, SELECTIVE),
    ({"tensor": 2, "expert": 2}, SHARED, {})]
"""`python -m tests.benchmarks.equivalence --only Experts` has many more."""
STEPS = 2


def check_layouts() -> None:
    for parallel_values, model, changes in LAYOUTS:
        wanted = config(parallel_values, model=model, **changes)
        expected: list[Any] = [None]
        if dist.get_rank() == 0:
            alone, results = train(wanted.model_copy(update={"parallel": type(wanted.parallel)()}), 1, STEPS)
            expected = [(results, whole_values(alone))]
        dist.broadcast_object_list(expected)
        trained, results = train(wanted, dist.get_world_size(), STEPS)
        for ours, theirs in zip(results, expected[0][0], strict=True):
            assert abs(ours.loss / theirs.loss - 1) < 1e-5, f"{parallel_values}: loss {ours.loss}, not {theirs.loss}"
            assert abs(ours.gradient_norm / theirs.gradient_norm - 1) < 1e-4, f"{parallel_values}: norm"
            counts = {layer: load.counts for layer, load in ours.experts.items()}
            assert counts == {layer: load.counts for layer, load in theirs.experts.items()}, parallel_values
        for name, value in whole_values(trained).items():
            torch.testing.assert_close(value, expected[0][1][name], rtol=0, atol=1e-4)


def check_idle_rank() -> None:
    """A rank whose experts get no token takes part in every exchange and has gradients of zero."""
    wanted = config({"data": "zero3", "expert": 4}, model={**MODEL, "balancing": "none"})
    alone = wanted.model_copy(update={"parallel": type(wanted.parallel)()})
    values = []
    for settings, ranks in ((alone, 1), (wanted, 4)):
        runtime = Runtime(dist.get_rank() if ranks > 1 else 0, ranks)
        model = parallel.build(settings, VOCABULARY, runtime)
        parallel.init_weights(model, 3)
        for _, bias in model.named_buffers():
            bias[2:] = -100.0
        optimizer = build_optimizer(model, settings.optimizer)
        mesh = model.mesh
        result = train_step(model, optimizer, micro_batches(0, mesh.data_rank, mesh.data_size), Collectives(runtime),
                            virtual_ranks=4)
        assert all(load.counts[2:] == (0, 0) for load in result.experts.values())
        assert all(parameter.grad is not None for parameter in model.parameters())
        values.append(whole_values(model))
    for name, value in values[0].items():
        torch.testing.assert_close(values[1][name], value, rtol=0, atol=1e-4)


UNEVEN = {**MODEL, "num_experts": 12}
"""12 experts over 2 x 4 ranks: FSDP2 shards the second dimension of 3 experts over 2 ranks."""
PLACED: list[dict[str, Any]] = [
    {"data": "zero3"}, {"data": "zero3", "expert": 2}, {"data": "zero3", "expert": 4}, {"tensor": 2, "expert": 2},
    {"data": "zero3", "expert": 2, "replicate": 2}, {"context": 2, "expert": 2}, {"data": "zero3"}]


def check_placement() -> None:
    """Initial values are those of one process, and no rank holds padding."""
    for index, layout in enumerate(PLACED):
        wanted = config(layout, model={**UNEVEN, "num_experts": 6 if index % 2 else 12})
        model = parallel.build(wanted, VOCABULARY, Runtime(dist.get_rank(), 4))
        parallel.init_weights(model, 3)
        for name, parameter in model.named_parameters():
            expected = init_parameter(name, parameter.shape, model.config, 3)
            assert torch.equal(whole(parameter), expected), f"{layout}: {name}"
            if parameter.ndim == 3:
                size = parameter.numel() * model.replicas(parameter)
                assert local(parameter).numel() * 4 == size, f"{layout}: {name} is padded"


def check_four_ranks() -> None:
    check_layouts()
    check_idle_rank()
    check_placement()


def test_ranks_that_share_experts_train_as_one_process():
    on_ranks(4, check_four_ranks)
