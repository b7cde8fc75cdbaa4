"""Tests of RoPE scaling against transformers' own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.every import every
from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.models import rope_scaling
from tidewheel.models.config import Rope
from tidewheel.models.families import Llama
from tidewheel.models.rope import apply_rope, frequencies, rope_table
from tidewheel.models.rope_scaling import YarnScaling
from tidewheel.train.config import TrainConfig

WIDTH, ORIGINAL, LONG = 64, 4096, 32768


def settings(kind: str, **values: Any) -> dict[str, Any]:
    """Return `rope_parameters` of a config.json."""
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 8.0, **values}


@every([
    settings("linear"), settings("dynamic"), settings("dynamic", factor=2.0),
    settings("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL),
    settings("yarn", original_max_position_embeddings=ORIGINAL),
    settings("yarn", original_max_position_embeddings=ORIGINAL, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5),
    settings("yarn", original_max_position_embeddings=ORIGINAL, mscale=1.0, mscale_all_dim=0.7),
    settings("yarn", original_max_position_embeddings=ORIGINAL, truncate=False, rope_theta=15e4, factor=32.0)])
def test_frequencies_equal_those_of_transformers(values: dict[str, Any]):
    theirs = transformers.LlamaConfig(head_dim=WIDTH, max_position_embeddings=ORIGINAL, rope_parameters=dict(values))
    expected, magnitude = ROPE_INIT_FUNCTIONS[values["rope_type"]](theirs, "cpu", seq_len=LONG)
    read = rope_scaling.from_hugging_face(values, ORIGINAL)
    model = Llama.model_validate({"head_dim": WIDTH, "rope_theta": values["rope_theta"], "rope_scaling": read,
                                  "max_sequence_length": LONG})
    rope = model.rope(0)
    assert rope is not None
    torch.testing.assert_close(frequencies(rope), expected, rtol=2e-6, atol=0)
    table = rope_table(torch.arange(3)[None], rope)
    assert table.cos[0, 0, 0, 0].item() == pytest.approx(magnitude)  # cos(0)


def test_dynamic_scaling_changes_nothing_up_to_the_original_length():
    plain = frequencies(Rope(WIDTH, 1e4, None, ORIGINAL))
    scaling = rope_scaling.DynamicScaling(kind="dynamic", factor=4.0, original_length=ORIGINAL)
    assert torch.equal(frequencies(Rope(WIDTH, 1e4, scaling, ORIGINAL)), plain)
    assert not torch.equal(frequencies(Rope(WIDTH, 1e4, scaling, ORIGINAL + 1)), plain)


def test_a_narrower_rope_turns_the_first_entries_of_a_head():
    x = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    table = rope_table(torch.arange(5)[None], Rope(8, 1e4))
    turned = apply_rope(x, table)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert torch.equal(turned[..., :8], apply_rope(x[..., :8], table))


def test_settings_without_a_kind_are_llama_3s_and_keep_their_form():
    made = build(TrainConfig, {"model": {"rope_scaling": {"factor": 4.0}}})
    dumped = made.model.shape()["rope_scaling"]
    assert dumped == {"factor": 4.0, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_length": 8192}
    assert build(TrainConfig, {"model": {"rope_scaling": {"factor": 4.0, "kind": "llama3"}}}) == made
    yarn = build(TrainConfig, {"model": {"rope_scaling": {"factor": 4.0, "kind": "yarn"}}})
    assert isinstance(yarn.model.rope_scaling, YarnScaling)
    assert build(TrainConfig, yarn.canonical()) == yarn
    kinds = [build(TrainConfig, {"model": {"rope_scaling": {"kind": kind}}}).recipe_hash()
             for kind in rope_scaling.KINDS]
    assert len(set(kinds)) == len(kinds)


@every([({"kind": "ntk"}, "there are linear, dynamic, yarn and llama3"), ({"kind": "linear", "factor": 0.5}, "factor"),
        ({"kind": "linear", "beta_fast": 3.0}, "beta_fast"),
        ({"low_frequency_factor": 4.0}, "is not below high_frequency_factor")])
def test_wrong_settings_are_refused_with_a_reason(case: tuple[dict[str, Any], str]):
    values, says = case
    with pytest.raises(ConfigError, match=says):
        build(TrainConfig, {"model": {"rope_scaling": values}})
