"""The chaos of reinforcement learning counts skipped, doubled and failed prompts where there are some."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.chaos.reinforcement import Count, count
from tests.unit.post.test_collector import collect, some_fail, waves
from tidewheel import storage
from tidewheel.post import ledger


def test_prompts_are_counted_from_the_ledger_and_the_shards(tmp_path: Path):
    config, _ = collect(tmp_path, some_fail)
    assert count(config, set()) == Count(18, 0, 0, 0, {"reward: raised": 2})
    _, entries = waves(config)
    folder = storage.store(config.data.uri)
    ledger.write(folder, replace(entries[1], admitted=(4, 6, 7, 8)))  # 5 was admitted, and 4 by the step before
    counted = count(config, set())
    assert (counted.skipped, counted.doubled) == (1, 1)
    assert counted.failed_in_a_loss == 1, "the shard has the answers to another prompt than the ledger says"
    ledger.write(folder, entries[1])
    trained_on = {f"p{row}" for row in range(20)}
    assert count(config, trained_on).failed_in_a_loss == 16
