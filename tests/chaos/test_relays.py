"""Workers that share a connection through the memory agent of their node, on a real cluster."""

import random

import pytest

from tests.chaos.events import freeze_agent, kill_worker
from tests.chaos.world import disturbed_run, prepare, settings

STEPS = 80


@pytest.mark.cluster
@pytest.mark.chaos
@pytest.mark.long
def test_a_run_with_relays_survives_the_loss_of_workers_and_a_frozen_agent(tmp_path):
    prepare(tmp_path)
    config = settings(tmp_path, "relays", STEPS, workers=4, overrides=("elastic.relay_workers=2",))
    rng = random.Random(4)
    with disturbed_run(tmp_path, config, nodes=2, cpus_per_node=2, step_seconds=0.2) as world:
        assert world.wait_for(lambda: world.step >= 5, 200)
        kill_worker(world, rng)
        assert world.wait_for(lambda: world.events("recovered") and world.step >= 15, 200)
        kill_worker(world, rng)
        assert world.wait_for(lambda: len(world.events("recovered")) > 1 and world.step >= 25, 200)
        assert "agent" in freeze_agent(world, rng)
        frozen_at = world.step
        assert world.wait_for(lambda: len(world.events("relay_left")) >= 2 and world.step >= frozen_at + 10, 200)
        assert world.over.wait(timeout=400)
        assert world.finished, world.drivers[-1].error
        failures = world.events("failure")
    assert failures
    assert all(event["detail"]["recovery"] == "in_place" for event in failures)
    assert world.problems == []
    logs = "".join(path.read_text() for path in (tmp_path / "runs" / "relays" / "logs").rglob("*") if path.is_file())
    assert "connects to the coordinator through the relay at" in logs
