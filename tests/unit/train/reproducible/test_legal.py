"""Tests that configurations that cannot be reproducible are refused with the nearest legal value."""

from __future__ import annotations

from typing import Any

import pytest

from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.train.config import TrainConfig


@pytest.mark.parametrize(("values", "nearest"), [
    ({"optimizer": {"kind": "muon"}}, "adam, adamw,"), ({"optimizer": {"kind": "adamw8bit"}}, "adam, adamw,"),
    ({"optimizer": {"kind": "adafactor"}}, "adam, adamw,"), ({"precision": "fp8"}, "precision bf16"),
    ({"parallel": {"reduce_dtype": "bf16"}}, "reduce_dtype fp32"),
    ({"parallel": {"pipeline": 2}, "elastic": {"max_workers": 2}}, "data zero1"),
    ({"parallel": {"pipeline": 2, "data": "ddp", "pipeline_schedule": "zbv_zero_bubble"},
      "elastic": {"max_workers": 2}}, "interleaved_1f1b")])
def test_refused(values: dict[str, Any], nearest: str):
    build(TrainConfig, values)
    with pytest.raises(ConfigError) as refused:
        build(TrainConfig, {**values, "reproducible": True})
    assert f"nearest legal choice: {nearest}" in str(refused.value)


def test_recomputation_needs_bits_that_all_workers_agree_on():
    values = {"guards": {"recomputation": {"share": 0.05}}, "elastic": {"max_workers": 2}}
    with pytest.raises(ConfigError, match="nearest legal choice: reproducible true"):
        build(TrainConfig, values)
    exact = build(TrainConfig, {**values, "reproducible": True})
    assert exact.recipe_hash() == build(TrainConfig, {"reproducible": True}).recipe_hash(), "it changes no bit"
    assert build(TrainConfig, {"reproducible": True, "guards": {"recomputation": {}}}).guards.recomputation is not None
    experts = {"kind": "mixtral", "dim": 32, "num_layers": 2, "num_heads": 4, "ffn_dim": 40, "num_experts": 4}
    with pytest.raises(ConfigError, match="nearest legal choice: expert 1"):
        build(TrainConfig, {**values, "reproducible": True, "model": experts,
                            "parallel": {"expert": 2, "data": "zero2"}})
    for share in (0, 1.5):
        with pytest.raises(ConfigError, match="share"):
            build(TrainConfig, {"reproducible": True, "guards": {"recomputation": {"share": share}}})


def test_reproducible_mode_changes_the_recipe_hash():
    fast, exact = build(TrainConfig, {}), build(TrainConfig, {"reproducible": True})
    assert fast.recipe_hash() != exact.recipe_hash()
    values = fast.canonical()
    assert values.pop("reproducible") is False
    assert build(TrainConfig, values).recipe_hash() == fast.recipe_hash()
