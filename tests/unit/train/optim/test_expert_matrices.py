"""Optimizers of stacked expert matrices [E, F, D]: each expert's matrix is treated by itself, in every layout."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.ranks import on_ranks
from tidewheel.train import optimizers
from tidewheel.train.optim.base import decays
from tidewheel.train.optim.build import build_optimizer

E, F, D, STEPS = 5, 12, 8, 3
STACK, ROUTER, BIAS = "blocks.0.ffn.experts.w1", "blocks.0.ffn.router.weight", "blocks.0.ffn.experts.w1_bias"
SHAPES = {STACK: (E, F, D), ROUTER: (E, D), BIAS: (E, F), "blocks.0.attention.wq.weight": (D, D)}


def values(step: int) -> dict[str, torch.Tensor]:
    """Return a gradient for each parameter; step -1: initial values."""
    generator = torch.Generator().manual_seed(step + 1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Held:
    """A model in pieces."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.held = parameters

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.held.items())

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        return []


def trained(model: Held, kind: str) -> Held:
    optimizer = build_optimizer(model, optimizers.KIND.build(kind, {"learning_rate": 0.02}))
    for step in range(STEPS):
        for name, gradient in values(step).items():
            parameter = model.held[name]
            parameter.grad = gradient if not isinstance(parameter, DTensor) else distribute_tensor(
                gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
        optimizer.step()
    return model


def plain() -> Held:
    return Held({name: nn.Parameter(value) for name, value in values(-1).items()})


def test_muon_orthogonalises_each_experts_matrix():
    model = trained(plain(), "muon")
    for expert in range(E):
        alone = nn.Parameter(values(-1)[STACK][expert].clone())
        muon = torch.optim.Muon([alone], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for step in range(STEPS):
            alone.grad = values(step)[STACK][expert]
            muon.step()
        torch.testing.assert_close(model.held[STACK][expert], alone, rtol=0, atol=1e-3)


def test_routers_and_biases_get_adamw_and_biases_do_not_decay():
    model, reference = trained(plain(), "muon"), trained(plain(), "adamw")
    adamw = optimizers.KIND.build("muon", {"learning_rate": 0.02})
    by_hand = {name: nn.Parameter(values(-1)[name]) for name in (ROUTER, BIAS)}
    rule = torch.optim.AdamW([{"params": [by_hand[ROUTER]], "weight_decay": 0.1},
                              {"params": [by_hand[BIAS]], "weight_decay": 0.0}], lr=0.02, betas=adamw.betas)
    for step in range(STEPS):
        for name, parameter in by_hand.items():
            parameter.grad = values(step)[name]
        rule.step()
    for name, parameter in by_hand.items():
        torch.testing.assert_close(model.held[name], parameter)
        torch.testing.assert_close(reference.held[name], parameter)
    assert [decays(name, parameter) for name, parameter in model.held.items()] == [True, True, False, True]


def check_sharded() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    for kind, tolerance in (("muon", 1e-3), ("adamw", 0.0), ("lion", 0.0), ("adafactor", 1e-5)):
        expected = trained(plain(), kind).held
        for tensor in (False, True):
            module = nn.Module()
            for number, (name, value) in enumerate(values(-1).items()):
                cut = [Shard(1 if name in (STACK, BIAS) else 0)]
                start = distribute_tensor(value, mesh["tensor"], cut, src_data_rank=None) if tensor else value
                module.register_parameter(str(number), nn.Parameter(start))
            fully_shard(module, mesh=mesh["shard"] if tensor else mesh["shard", "tensor"]._flatten("all"))
            model = trained(Held(dict(zip(SHAPES, module.parameters()))), kind)
            for name, value in model.held.items():
                worst = (value.full_tensor() - expected[name]).abs().max()
                assert worst <= tolerance, f"{kind}, tensor {tensor}: {name} differs by {worst}"


def test_sharded_stacks_are_updated_as_in_one_process():
    on_ranks(4, check_sharded)
