"""A worker that becomes slow is named with its node, and another one takes its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos.world import disturbed_run, prepare, settings
from tidewheel import jsonlog
from tidewheel.train.audit import audit

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(180)]


def test_a_slow_worker_is_replaced_by_one_that_stands_by(tmp_path: Path):
    prepare(tmp_path)
    config = settings(tmp_path, "slow", 160, workers=2, overrides=(
        "elastic.standby_workers=1", "elastic.slow_worker=replace", "elastic.slow_factor=2.5",
        "metrics.straggler={every_steps: 5, window: 3}"))
    slow = tmp_path / "slow.json"
    with disturbed_run(tmp_path, config, nodes=3, step_seconds=0.05, CHAOS_SLOW=str(slow)) as world:
        assert world.wait_for(lambda: world.step >= 20 and world.node_of_rank(1) is not None, 90)
        victim = world.node_of_rank(1)
        assert victim is not None
        slow.write_text(json.dumps({"node": victim.node_id[:12], "factor": 12}))
        assert world.over.wait(timeout=120)
    found = [event["detail"] for event in world.events("slow_worker")]
    assert found, "nobody was named"
    assert (found[0]["node"], found[0]["action"]) == (victim.node_id, "replace")
    assert found[0]["ratio"] > 2.5
    ledger = jsonlog.read(world.place, "ledger.jsonl")
    last = max(record["generation"] for record in ledger)
    there = {record["node"] for record in ledger if record["generation"] == last}
    assert len(there) == 2
    assert victim.node_id[:12] not in there
    checked = audit(config.run_uri)
    assert checked.ok, checked.summary()
    assert (checked.steps, checked.redone) == (160, 0)
