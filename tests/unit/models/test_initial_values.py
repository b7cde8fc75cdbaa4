"""Families begin as transformers' models do, apart from smaller projections into the residual stream."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers

from tests.oracles import ORACLES, imported
from tidewheel.models.initial_values import init_parameter

STD = 0.02
RANDOM_THERE = ("router.bias",)
"""Biases that transformers draws. Ours are 0, so that a new router prefers no expert."""


@pytest.mark.parametrize("name", [name for name in ORACLES if "," not in name])
def test_initial_values_have_the_distribution_of_transformers(name: str, tmp_path: Path):
    oracle = ORACLES[name]
    torch.manual_seed(0)
    configuration = getattr(transformers, oracle.configuration)(
        **{**oracle.widths, **oracle.settings, "initializer_range": STD})
    getattr(transformers, oracle.model)._from_config(configuration).save_pretrained(tmp_path)
    model = imported(tmp_path)
    config = type(model.config).model_validate({**model.config.model_dump(), "init_std": STD})
    for key, theirs in model.named_parameters():
        ours = init_parameter(key, theirs.shape, config, seed=0)
        if theirs.std(correction=0) == 0:  # norms and biases
            assert torch.equal(ours, theirs.detach()), key
        elif not key.endswith(RANDOM_THERE):
            is_smaller = key.endswith(config.RESIDUAL_OUTPUTS) and name != "gpt2"
            expected = theirs.std() / (math.sqrt(2 * config.num_layers) if is_smaller else 1)
            assert ours.std().item() == pytest.approx(expected.item(), rel=6 / math.sqrt(2 * theirs.numel())), key
            assert abs(ours.mean()) < 6 * STD / math.sqrt(theirs.numel()), key
