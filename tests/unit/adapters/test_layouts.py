"""Adapters train the same under every layout as in one process, and the frozen base does not move."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import on_ranks
from tests.unit.train.parallel.layouts import assert_same_training, config, train, whole, whole_values

RANKS = 4
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"kind": "lora", "rank": 4, "targets": ["attention", "ffn"], "b_rate": 4.0},
    "pissa": {"kind": "lora", "rank": 4, "start": "pissa"},
    "dora": {"kind": "dora", "rank": 4},
    "ia3": {"kind": "ia3"},
    "bottleneck": {"kind": "bottleneck", "width": 8},
    "prefix": {"kind": "prefix_tuning", "tokens": 3, "init_std": 0.5},
    "prompt": {"kind": "prompt_tuning", "tokens": 3, "init_std": 0.5},
    "nf4": {"kind": "lora", "rank": 4, "base": "nf4"},
    "embedding": {"kind": "lora", "rank": 4, "targets": ["embedding", "wq"], "start": "pissa"},
    "experts": {"kind": "lora", "rank": 4, "targets": ["wq", "experts"]},
    "experts_pissa": {"kind": "lora", "rank": 4, "targets": ["wq", "experts"], "start": "pissa"},
}
MIXTURE = {"kind": "mixtral", "ffn_dim": 64, "num_experts": 4, "experts_per_token": 2, "balancing": "bias",
           "balancing_rate": 0.01}
SHAPES: dict[str, dict[str, Any]] = {"nf4": {"dim": 128, "ffn_dim": 128}, "experts": MIXTURE, "experts_pissa": MIXTURE}
"""Settings of the model for some kinds."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"data": "ddp"}, "zero1": {"data": "zero1"}, "zero2": {"data": "zero2"}, "zero3": {"data": "zero3"},
    "hsdp": {"data": "zero3", "replicate": 2}, "tensor": {"tensor": 2, "data": "zero3"},
    "context": {"context": 2, "data": "zero2"}, "pipeline": {"pipeline": 2, "tensor": 2},
    "expert": {"data": "zero3", "expert": 2}, "expert_tensor": {"data": "zero2", "expert": 2, "tensor": 2},
}
SHORT = (("lora", "context"), ("lora", "pipeline"), ("pissa", "tensor"), ("dora", "tensor"), ("ia3", "tensor"),
         ("bottleneck", "hsdp"), ("prefix", "pipeline"), ("nf4", "tensor"), ("prompt", "zero3"),
         ("embedding", "tensor"), ("experts", "expert_tensor"))
"""Each kind once, and the layouts that cut in a way of their own."""
REFUSED = {"prompt": ("tensor", "pipeline", "context")}
"""Layouts that a kind refuses."""


def _compare(pairs: tuple[tuple[str, str], ...]) -> None:
    """Train each kind under its layout and compare with one process; called on every rank."""
    for kind, layout in pairs:
        wanted = config(LAYOUTS[layout], adapter=KINDS[kind], model=SHAPES.get(kind, {}))
        model = assert_same_training(wanted, steps=2)
        assert all(".adapter." in name for name, _ in model.named_parameters()), (kind, layout)


def test_adapters_train_the_same_under_every_layout():
    on_ranks(RANKS, _compare, SHORT)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_the_same_under_every_layout(kind: str):
    layouts = [layout for layout in LAYOUTS if layout not in REFUSED.get(kind, ())]
    if SHAPES.get(kind) is not MIXTURE:
        layouts = [layout for layout in layouts if not layout.startswith("expert")]
    on_ranks(RANKS, _compare, tuple((kind, layout) for layout in layouts))


def _checked(settings: dict[str, Any]) -> None:
    assert_same_training(config({"data": "zero3"}, **settings), steps=2)


@pytest.mark.long
def test_adapters_work_with_recomputation_compilation_reproducible_mode_and_tied_embeddings():
    for settings in ({"adapter": KINDS["lora"], "reproducible": True},
                     {"adapter": KINDS["dora"], "memory": {"activation_checkpointing": "full"}},
                     {"adapter": KINDS["experts"], "model": MIXTURE, "compile": True},
                     {"adapter": KINDS["bottleneck"], "memory": {"activation_checkpointing": "attention"}},
                     {"adapter": {**KINDS["lora"], "targets": ["wq", "embedding"]}, "model": {"tie_embeddings": True}}):
        on_ranks(2, _checked, settings)


def _same_bits_with_experts_apart() -> None:
    """Reproducible mode: experts with adapters, shared by two ranks, have the bits of one process."""
    wanted = config({"data": "zero3", "expert": 2}, adapter=KINDS["experts"], model=MIXTURE, reproducible=True)
    alone, _ = train(wanted.model_copy(update={"parallel": type(wanted.parallel)()}), 1, 2)
    model, _ = train(wanted, 2, 2)
    expected = whole_values(alone)
    for name, value in whole_values(model).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.long
def test_experts_with_adapters_have_the_same_bits_wherever_they_are():
    on_ranks(2, _same_bits_with_experts_apart)


def test_only_the_adapter_changes():
    wanted = config({}, adapter=KINDS["lora"])
    model, results = train(wanted, 1, 4)
    fresh, _ = train(wanted, 1, 0)
    before = dict(fresh.frozen_parameters())
    for name, parameter in model.frozen_parameters():
        assert torch.equal(whole(parameter), whole(before[name])), name
    started = dict(fresh.named_parameters())
    moved = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, started[name])]
    assert len(moved) == len(started)
    assert len({result.loss for result in results}) == len(results)
