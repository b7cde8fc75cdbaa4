"""Settings of adapters that are refused before any process starts, and what they decide."""

from __future__ import annotations

from typing import Any

from tests.every import every
from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.models.adapting.names import matches
from tidewheel.train.config import TrainConfig

LORA = {"kind": "lora"}
NF4 = {"kind": "lora", "base": "nf4"}
WORKERS = {"elastic": {"max_workers": 2}, "batch": {"virtual_ranks": 2}}


@every((
    ({"adapter": LORA, "model": {"fused_products": True}}, "nearest legal choice: false"),
    ({"adapter": LORA, "memory": {"activation_checkpointing": "selective", "keep_products": ["wo"]}},
     "nearest legal choice: activation_checkpointing full"),
    ({"adapter": NF4, "model": {"dim": 128, "num_heads": 4, "ffn_dim": 192}, "parallel": {"tensor": 2}, **WORKERS},
     "192 inputs of blocks.0.ffn.w2 with parallel.tensor 2 are not; nearest legal choice: parallel.tensor 1"),
    ({"adapter": NF4, "model": {"dim": 96, "num_heads": 4, "ffn_dim": 192}}, "legal choice: adapter.base plain"),
    ({"adapter": NF4, "precision": "fp8"}, "nearest legal choice: precision bf16"),
    ({"adapter": {"kind": "prompt_tuning"}, "parallel": {"tensor": 2}, **WORKERS}, "parallel.tensor 1"),
    ({"adapter": {"kind": "lora", "ranks": {"wq": 0}}}, "above 0"),
    ({"adapter": {"kind": "dora", "start": "pissa"}}, "zero"),
    ({"adapter": {"kind": "lroa"}}, "did you mean 'lora'"),
    ({"adapter": {"rank": 3}}, "which adapter is it"),
))
def test_what_cannot_be_trained_is_refused(case: tuple[dict[str, Any], str]):
    settings, reason = case
    try:
        build(TrainConfig, settings)
    except ConfigError as error:
        refusal = str(error)
    else:
        refusal = "nothing"
    assert reason in refusal, refusal


def test_an_adapter_is_part_of_the_recipe_and_its_absence_is_not():
    plain = build(TrainConfig, {})
    assert "adapter" not in plain.decisive()
    recipes = {plain.recipe_hash(), *(build(TrainConfig, {"adapter": adapter}).recipe_hash()
                                      for adapter in (LORA, NF4, {"kind": "dora"}, {"kind": "lora", "b_rate": 2.0}))}
    assert len(recipes) == 5
    assert build(TrainConfig, {"adapter": LORA}).versions()["adapter_lora"] == 1


@every((("wq", True), ("attention", True), ("attention.w*", True), ("blocks.3", True), ("blocks.*.attention.wq", True),
        ("w", False), ("blocks.1", False), ("attention.wq.weight", False), ("3.wq", False)))
def test_patterns_match_whole_components(case: tuple[str, bool]):
    pattern, expected = case
    assert matches(pattern, "blocks.3.attention.wq") is expected
