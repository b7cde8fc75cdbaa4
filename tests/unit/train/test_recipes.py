"""Tests that every configuration in the repository loads and has a legal layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidewheel.config import build, load
from tidewheel.train.config import TrainConfig
from tidewheel.train.parallel import legal

FILES = sorted((Path(__file__).parents[3] / "jobs/configs").glob("*.yaml"))
LLAMA3_VOCABULARY = 128_256


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_configuration_loads_and_fits_its_cluster(path):
    config = load(TrainConfig, str(path))
    sizes = legal.sizes(config)
    assert {config.elastic.min_workers, config.elastic.max_workers} <= set(sizes)
    legal.check_data(config, LLAMA3_VOCABULARY, min(config.model.max_sequence_length, 8192))


@pytest.mark.parametrize(("settings", "recipe"), [
    ({}, "ce1867ba3369f316"),
    ({"optimizer": {"learning_rate": 1e-4, "clip_norm": 0.5}, "schedule": {"kind": "wsd", "warmup_steps": 5}},
     "98c629bd0f09ba13"),
    ({"optimizer": {"kind": "muon"}}, "02e99d01f0928259"),
])
def test_a_recipe_keeps_its_hash(settings, recipe):
    assert build(TrainConfig, settings).recipe_hash() == recipe
