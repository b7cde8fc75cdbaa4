"""Ray's control store (GCS) dies and comes back, with its tables in a Redis server: training does not notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.control_store import measure
from tests.chaos.control_store import REDIS_SERVER

pytestmark = [pytest.mark.cluster, pytest.mark.chaos, pytest.mark.long]


@pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed; REDIS_SERVER may name it")
def test_training_goes_on_while_the_control_store_is_away(tmp_path: Path):
    outcome = measure(tmp_path, away=5.0, step_seconds=0.1)
    assert outcome.problems == []
    assert outcome.steps >= 20
