"""A worker that becomes slow is reported with its node, and a standby worker replaces it."""

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

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def _standby_workers(world: World) -> int:
    """Return the number of running workers without a rank."""
    if not ray.is_initialized():
        ray.init(address=world.cluster.address, log_to_driver=False, logging_level="ERROR")
    coordinator = ray.get_actor(actor_name(world.config.run_uri), namespace=NAMESPACE)
    return int(ray.get(coordinator.standing_by.remote(), timeout=60))


@pytest.fixture(autouse=True)
def disconnected():
    yield
    ray.shutdown()


def test_a_slow_worker_is_replaced_by_a_standby_worker(tmp_path: Path):
    prepare(tmp_path)
    config = settings(tmp_path, "slow", 300, workers=2, overrides=(
        "elastic.standby_workers=1", "elastic.slow_worker=replace", "elastic.slow_factor=2.5",
        "metrics.straggler={every_steps: 5, window: 3}"))
    slow, hurry = tmp_path / "slow.json", tmp_path / "hurry"
    with disturbed_run(tmp_path, config, nodes=3, step_seconds=0.5, CHAOS_SLOW=str(slow),
                       CHAOS_HURRY=str(hurry)) as world:
        assert world.wait_for(lambda: world.step >= 10 and world.node_of_rank(1) is not None, 120)
        assert world.wait_for(lambda: _standby_workers(world) == 1, 120)  # a slow worker is replaced only by a standby
        victim = world.node_of_rank(1)
        assert victim is not None
        slow.write_text(json.dumps({"node": victim.node_id[:12], "factor": 12}))
        hurry.touch()
        assert world.over.wait(timeout=240)
    reports = [event["detail"] for event in world.events("slow_worker")]
    assert reports, "no slow worker was reported"
    assert (reports[0]["node"], reports[0]["action"]) == (victim.node_id, "replace")
    assert reports[0]["ratio"] > 2.5
    ledger = jsonlog.read(world.run_store, "ledger.jsonl")
    last = max(record["generation"] for record in ledger)
    nodes = {record["node"] for record in ledger if record["generation"] == last}
    assert len(nodes) == 2
    assert victim.node_id[:12] not in nodes
    checked = audit(config.run_uri)
    assert checked.ok, checked.summary()
    assert (checked.steps, checked.redone) == (300, 0)
