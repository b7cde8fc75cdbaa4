"""The benchmark of silent corruption finds what it plants, in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.silent_corruption import RANKS, STATE, row, table, work
from tests.ranks import on_ranks
from tests.unit.train.helpers import write_shards

FLIPS, CLEAN_STEPS, SHARE = 50, 300, 0.01


@pytest.mark.long
def test_flips_are_found_and_named(tmp_path: Path):
    write_shards(tmp_path / "shards", rows=200)
    on_ranks(RANKS, work, str(tmp_path), FLIPS, CLEAN_STEPS, SHARE)
    results = json.loads((tmp_path / "results.json").read_text())
    _, problems = table(results, SHARE)
    assert problems == []
    assert results[f"alarms {SHARE:g}"] == results["alarms 1"] == 0
    for line in results["1"]:
        if line["place"] in STATE:
            assert line["steps"] == 1, "with a check in each step"
    assert row("all", results["1"])["missed"] == 0
