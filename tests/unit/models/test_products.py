"""Products of one input with several matrices: as one product they give the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import on_ranks
from tests.unit.train.parallel.layouts import config, train
from tidewheel.errors import ConfigError
from tidewheel.models.blocks import Attention
from tidewheel.models.decoder import Decoder, next_tokens
from tidewheel.models.families import Llama
from tidewheel.models.initial_values import init_parameter
from tidewheel.models.products import products
from tidewheel.train.memory.activations import product_names

FUSED = {"fused_products": True}
SHAPE: dict[str, Any] = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 64}


def decoder(**settings: Any) -> Decoder:
    """Return a small decoder, always with the same weights."""
    model = Decoder(Llama(**SHAPE, **settings), 50)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(init_parameter(name, parameter.shape, model.config, seed=1))
    return model


def loss_of(model: Decoder) -> torch.Tensor:
    """Return the loss of two rows with two documents each."""
    tokens = torch.arange(64).reshape(2, 32) % 50
    segments = torch.arange(32).expand(2, 32) // 20
    positions = torch.arange(32).expand(2, 32) % 20
    return model(tokens, positions, segments, next_tokens(tokens, segments))


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*arguments, **named or {})


@pytest.mark.parametrize("bf16", [False, True])
def test_loss_and_gradients_are_those_of_products_apart(bf16: bool):
    apart = decoder()
    fused = decoder(**FUSED)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        expected = loss_of(apart)
        loss = loss_of(fused)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-3 if bf16 else 1e-6, atol=0)
    names = dict(fused.named_parameters())
    assert names.keys() == dict(apart.named_parameters()).keys()  # one layout of a checkpoint
    for name, parameter in apart.named_parameters():
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(names[name].grad, parameter.grad, rtol=0, atol=scale * (2e-2 if bf16 else 1e-6),
                                   msg=lambda text, name=name: f"{name}: {text}")


def test_a_block_has_four_products_instead_of_seven():
    counts = []
    for settings in ({}, FUSED):
        with torch.no_grad(), Products() as counted:
            loss_of(decoder(**settings))
        counts.append(counted.count)
    layers = SHAPE["num_layers"]
    assert counts[0] - counts[1] == 3 * layers
    assert counts[1] == 4 * layers + 1  # and the output


def test_layers_with_biases():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, rows) for rows in (4, 6)]
    x = torch.randn(3, 8)
    for out, layer in zip(products(x, layers, fused=True), layers):
        torch.testing.assert_close(out, layer(x))


def test_an_own_family_with_this_attention_has_it_too():
    assert Attention(Llama(**SHAPE, **FUSED), bias=True).products.fused
    assert product_names(Llama(**SHAPE, **FUSED)) == ("attention.wo", "ffn.w2")  # what keep_products may name


def test_every_layout_trains_as_one_process_does_with_products_apart():
    on_ranks(2, every_layout)


def every_layout() -> None:
    """Train two steps in each layout on this rank."""
    _, expected = train(config({}), 1, 2)
    for layout in ({"data": "zero3"}, {"data": "zero1"}, {"tensor": 2}, {"context": 2}, {"pipeline": 2}):
        _, results = train(config(layout, model=FUSED), dist.get_world_size(), 2)
        for ours, theirs in zip(results, expected):
            assert abs(ours.loss / theirs.loss - 1) < 1e-5, f"{layout}: loss {ours.loss}, not {theirs.loss}"
            assert abs(ours.gradient_norm / theirs.gradient_norm - 1) < 1e-4, f"{layout}: norm {ours.gradient_norm}"


def test_the_setting_is_no_part_of_the_recipe_and_is_refused_with_fp8():
    assert config({}, model=FUSED).recipe_hash() == config({}).recipe_hash()
    with pytest.raises(ConfigError, match="nearest legal choice: fused_products false"):
        config({}, model=FUSED, precision="fp8")
