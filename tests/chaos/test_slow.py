"""A worker that becomes slow is named with its node, and another one takes its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray

from tests.chaos.world import World, disturbed_run, prepare, settings
from tidewheel import jsonlog
from tidewheel.elastic.coordinator import actor_name
from tidewheel.elastic.nodes import NAMESPACE
from tidewheel.train.audit import audit

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]


def _standing_by(world: World) -> int:
    """Workers that are warm and have no rank."""
    if not ray.is_initialized():
        ray.init(address=world.cluster.address, log_to_driver=False, logging_level="ERROR")
    coordinator = ray.get_actor(actor_name(world.config.run_uri), namespace=NAMESPACE)
    return int(ray.get(coordinator.standing_by.remote(), timeout=60))


@pytest.fixture(autouse=True)
def disconnected():
    yield
    ray.shutdown()


def test_a_slow_worker_is_replaced_by_one_that_stands_by(tmp_path: Path):
    prepare(tmp_path)
    config = settings(tmp_path, "slow", 300, workers=2, overrides=(
        "elastic.standby_workers=1", "elastic.slow_worker=replace", "elastic.slow_factor=2.5",
        "metrics.straggler={every_steps: 5, window: 3}"))
    slow, hurry = tmp_path / "slow.json", tmp_path / "hurry"
    with disturbed_run(tmp_path, config, nodes=3, step_seconds=0.5, CHAOS_SLOW=str(slow),
                       CHAOS_HURRY=str(hurry)) as world:
        assert world.wait_for(lambda: world.step >= 10 and world.node_of_rank(1) is not None, 120)
        assert world.wait_for(lambda: _standing_by(world) == 1, 120)  # who is slow is judged by who could take over
        victim = world.node_of_rank(1)
        assert victim is not None
        slow.write_text(json.dumps({"node": victim.node_id[:12], "factor": 12}))
        hurry.touch()
        assert world.over.wait(timeout=240)
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
    assert (checked.steps, checked.redone) == (300, 0)
