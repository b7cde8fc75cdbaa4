"""Async tensor parallelism gives the losses and gradients of plain tensor parallelism, and is refused where it cannot.

On a CPU torch's operators are its own fallbacks: a collective and then the products.
"""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from tests.every import every
from tests.ranks import on_ranks
from tests.symmetric_memory import on_cpu
from tests.unit.train.parallel.layouts import SHAPE, VOCABULARY, config, micro_batches, train, whole
from tidewheel.errors import ConfigError
from tidewheel.models.blocks.attention import Attention
from tidewheel.models.blocks.block import Block
from tidewheel.models.family import FeedForwardShape, Model
from tidewheel.train import parallel
from tidewheel.train.compile import compile_blocks
from tidewheel.train.config import TrainConfig
from tidewheel.train.parallel import async_tensor, building
from tidewheel.train.runtime import Runtime
from tidewheel.versions import Version

CPU = torch.device("cpu")
SETTINGS: tuple[dict[str, Any], ...] = (
    {"fused_products": True}, {"tie_embeddings": True, "qk_norm": False, "activation_checkpointing": "full"},
    {"num_kv_heads": 2, "activation_checkpointing": "selective"}, {"activation_checkpointing": "attention"})
"""Each setting of the model and of the activations once. `every_product_is_overlapped` has none of them."""


class Biased(Model):
    """A family with biases, also of layers sharded by rows, and a feed-forward without `products`."""

    VERSION: ClassVar[Version] = Version("biased")
    FEED_FORWARD: ClassVar[FeedForwardShape] = FeedForwardShape(inputs=1, kept=2, kept_compiled=1)
    RESIDUAL_OUTPUTS: ClassVar[tuple[str, ...]] = ("attention.wo.weight", "ffn.down.weight")

    def block(self, layer: int) -> nn.Module:
        return Block(self, Attention(self, bias=True), Mlp(self.dim, self.ffn_width))

    def tensor_parallel(self, layer: int) -> Any:
        return {**super().tensor_parallel(layer), "ffn.up": "columns", "ffn.down": "rows"}


class Mlp(nn.Module):
    """down(gelu(up(x))), with biases."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, inner), nn.Linear(inner, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Collectives(TorchDispatchMode):
    """Counts the collectives with products, and those without."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.counts[function.name()] += 1
        return function(*arguments, **named or {})


@pytest.mark.long  # half a minute
def test_two_ranks_compute_the_same_with_overlapped_collectives():
    on_ranks(2, _two_ranks)


def _two_ranks() -> None:
    with pytest.raises(ConfigError, match="for CPU"):
        built(config({"tensor": 2, "async_tensor": True}))
    with on_cpu():
        same_gradients()
        every_product_is_overlapped()
        compiled_once()
        with pytest.raises(ConfigError, match="are on node-0, node-1"):
            async_tensor.check(dist.group.WORLD, CPU, f"node-{dist.get_rank()}")


@every(SETTINGS)
def same_gradients(settings: dict[str, Any]) -> None:
    model = {name: value for name, value in settings.items() if name != "activation_checkpointing"}
    memory = {name: value for name, value in settings.items() if name == "activation_checkpointing"}
    assert_same(config({"tensor": 2}, model=model, memory=memory))


def assert_same(plain: TrainConfig) -> None:
    """Check that losses and gradients of a layout do not change when its collectives are overlapped."""
    layout = plain.parallel.model_copy(update={"async_tensor": True})
    expected, reference = gradients(plain)
    losses, found = gradients(plain.model_copy(update={"parallel": layout}))
    assert torch.allclose(losses, expected, rtol=1e-6, atol=0)
    assert found.keys() == reference.keys()
    for name, value in reference.items():
        worst = (found[name] - value).abs().max().item()
        assert worst <= 1e-6 * max(1.0, value.abs().max().item()), f"{name} differs by {worst}"


def gradients(wanted: TrainConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the losses of two micro-batches and the whole gradients of their sum, by name."""
    model = built(wanted)
    model.zero_grad()
    mesh = model.mesh
    losses = model.forward_backward(micro_batches(0, mesh.data_rank, mesh.data_size)[:2], nullcontext())
    return losses, {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def built(wanted: TrainConfig) -> parallel.ParallelModel:
    model = parallel.build(wanted, VOCABULARY, Runtime(dist.get_rank(), dist.get_world_size(), node="one"))
    parallel.init_weights(model, seed=3)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero at first
            nn.init.constant_(parameter, 0.1)
    return model


def every_product_is_overlapped() -> None:
    """Check the operators of a block's forward and backward pass, and of a family with biases."""
    wanted = config({"tensor": 2, "async_tensor": True}, memory={"activation_checkpointing": "selective"})
    model = built(wanted)
    with Collectives() as collectives:
        model.forward_backward(micro_batches(0)[:1], nullcontext())
    counts = collectives.counts
    assert counts["symm_mem::fused_all_gather_matmul"] == 4 * SHAPE["num_layers"], counts  # qkv, w1 and w3; wo, w2
    assert counts["symm_mem::fused_matmul_reduce_scatter"] == 4 * SHAPE["num_layers"], counts
    biased = wanted.model_copy(update={"model": Biased(**SHAPE), "memory": type(wanted.memory)(), "parallel": type(
        wanted.parallel)(tensor=2)})
    assert_same(biased)


def compiled_once() -> None:
    torch._dynamo.reset()
    counters.clear()
    _, expected = train(config({"tensor": 2}), 2, 2)
    with mock.patch.object(building, "compile_blocks", functools.partial(compile_blocks, backend="aot_eager")):
        _, results = train(config({"tensor": 2, "async_tensor": True}, compile=True), 2, 2)
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert counters["stats"]["unique_graphs"] == 1, dict(counters["stats"])
    for ours, theirs in zip(results, expected):
        assert abs(ours.loss / theirs.loss - 1) < 1e-6


@pytest.mark.long
def test_overlapped_collectives_beside_fsdp2_and_pipelines():
    on_ranks(4, _four_ranks)


def _four_ranks() -> None:
    with on_cpu():
        for layout in ({"data": "zero3"}, {"data": "zero1"}, {"context": 2}, {"pipeline": 2}):
            assert_same(config({"tensor": 2, **layout}, model={"tie_embeddings": True}))


def test_shared_memory_is_made_anew_for_each_generation(monkeypatch: pytest.MonkeyPatch):
    kept = {"0": torch.zeros(1)}
    monkeypatch.setattr(symmetric_memory, "_group_name_to_workspace_tensor", kept)
    asked: list[str] = []
    monkeypatch.setattr(symmetric_memory, "get_symm_mem_workspace", lambda name, min_size: asked.append(name))
    async_tensor._share_memory(SimpleNamespace(group_name="0"))
    assert (asked, kept) == (["0"], {})
    monkeypatch.setattr(symmetric_memory, "get_symm_mem_workspace", mock.Mock(side_effect=RuntimeError("no peer\nat")))
    with pytest.raises(ConfigError, match="cannot share memory: no peer"):
        async_tensor._share_memory(SimpleNamespace(group_name="0"))


def test_another_torch_without_the_operators_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(async_tensor, "OPERATORS", ("fused_nothing",))
    assert "no operator symm_mem::fused_nothing" in (async_tensor.reason_against(CPU) or "")
