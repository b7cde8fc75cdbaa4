"""The coordinator and Ray Train's controller die while the driver lives: the same driver trains to the end."""

from __future__ import annotations

import os
import random
import signal

import pytest

from tests.chaos.events import kill_controller, kill_coordinator
from tests.chaos.world import disturbed_run, prepare, settings
from tidewheel.checkpoint.digest import digest
from tidewheel.elastic.trainer import fit_local
from tidewheel.train.audit import audit

MOST_SECONDS = 300.0


@pytest.mark.long
def test_a_driver_outlives_its_coordinator_and_its_controller(tmp_path):
    prepare(tmp_path)
    config, reference = (settings(tmp_path, name, 60, workers=2, overrides=("reproducible=true",))
                         for name in ("run", "undisturbed"))
    fit_local(reference)
    with disturbed_run(tmp_path, config, nodes=2, step_seconds=0.1) as world:
        for step, kill in ((10, kill_coordinator), (35, kill_controller)):
            assert world.wait_for(lambda: world.step >= step, MOST_SECONDS)  # noqa: B023
            assert "process" in kill(world, random.Random(1))
        assert world.wait_for(lambda: len(world.beside("ElasticController")) == 1 and world.step >= 40, MOST_SECONDS)
        world.over.wait(timeout=MOST_SECONDS)
        assert world.finished
        assert [driver.code for driver in world.drivers] == [0]
    assert [event["kind"] for event in world.events("driver_start", "coordinator_lost")] == [
        "driver_start", *["driver_start", "coordinator_lost"] * 2]
    audited = audit(config.run_uri)
    assert audited.ok, audited.summary()
    assert digest(config.run_uri).state == digest(reference.run_uri).state


@pytest.mark.long
def test_a_driver_ends_a_coordinator_that_freezes(tmp_path):
    prepare(tmp_path)
    config, reference = (settings(tmp_path, name, 300, workers=2, overrides=("reproducible=true",))
                         for name in ("run", "undisturbed"))
    fit_local(reference)
    with disturbed_run(tmp_path, config, nodes=2, step_seconds=0.1, CHAOS_HURRY=str(tmp_path / "hurry")) as world:
        assert world.wait_for(lambda: world.step >= 10, MOST_SECONDS)
        [frozen] = world.beside("Coordinator")
        os.kill(frozen, signal.SIGSTOP)
        assert world.wait_for(lambda: bool(world.events("coordinator_lost")), MOST_SECONDS)
        (tmp_path / "hurry").touch()
        world.over.wait(timeout=MOST_SECONDS)
        assert world.finished
        assert [driver.code for driver in world.drivers] == [0]
    assert [event["kind"] for event in world.events("driver_start", "coordinator_lost")] == [
        "driver_start", "driver_start", "coordinator_lost"]
    audited = audit(config.run_uri)
    assert audited.ok, audited.summary()
    assert digest(config.run_uri).state == digest(reference.run_uri).state


@pytest.mark.long
def test_the_next_driver_finds_the_agents_on_nodes_that_it_does_not_use():
    import ray

    from tidewheel.cluster.local import LocalCluster
    from tidewheel.elastic.agents import Agents

    with LocalCluster(nodes=2, cpus_per_node=1) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            first, second = [node.node_id for node in cluster.nodes]
            former, other, later = Agents("run"), Agents("another run"), Agents("run")
            former.on([first])
            other.on([first])
            assert list(later.on([second])) == [second]
            assert set(later.known()) == {first, second}
            assert later.known()[first] == former.known()[first] != other.known()[first]
            assert later.token == former.token
            later.stop()
            other.stop()
        finally:
            ray.shutdown()
