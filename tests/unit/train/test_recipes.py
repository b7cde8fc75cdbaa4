"""Every configuration that comes with the repository can be loaded, and its layout is legal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidewheel.config import load
from tidewheel.train.config import TrainConfig
from tidewheel.train.parallel import legal

FILES = sorted((Path(__file__).parents[3] / "jobs/configs").glob("*.yaml"))
LLAMA3_VOCABULARY = 128_256


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_loads_and_fits_its_cluster(path):
    config = load(TrainConfig, str(path))
    sizes = legal.sizes(config)
    assert {config.elastic.min_workers, config.elastic.max_workers} <= set(sizes)
    legal.check_data(config, LLAMA3_VOCABULARY, min(config.model.max_sequence_length, 8192))
