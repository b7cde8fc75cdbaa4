"""Reinforcement learning on a cluster that loses nodes and gains some: no rollout is lost and no bit differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.unit.post.runs import rollout_run
from tidewheel.checkpoint.digest import digest
from tidewheel.cluster.local import LocalCluster
from tidewheel.elastic.trainer import fit, fit_local
from tidewheel.errors import RolloutError
from tidewheel.post.audit import audit_rollouts
from tidewheel.post.groups import Group
from tidewheel.post.pool import RayPool
from tidewheel.train.audit import audit
from tidewheel.train.policy.config import GeneratorsConfig

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 24


def test_killed_trainers_and_generators_change_nothing(tmp_path: Path):
    config = rollout_run(tmp_path, "elastic", f"steps={STEPS}", "rollouts.generators.processes=2",
                         "rollouts.look_ahead=1", "elastic.min_workers=1", "elastic.max_workers=2",
                         "elastic.join_wait_seconds=0.5", "elastic.resize_interval_seconds=1")
    with LocalCluster(nodes=4, cpus_per_node=1) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        changes: list[int] = []

        def on_progress(progress: dict[str, Any]) -> None:
            step = progress.get("step", 0)
            if step >= 4 + 4 * len(changes) and len(changes) < 4:
                changes.append(step)
                if len(changes) % 2:
                    cluster.kill_node(cluster.nodes[-1])
                else:
                    cluster.add_node()

        try:
            result = fit(config, on_progress=on_progress)
        finally:
            ray.shutdown()
    assert result.steps == STEPS
    assert len(changes) == 4
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "runs/elastic/rollouts.jsonl").read_text().splitlines()]
    assert kinds.count("step") == STEPS
    for proof in (audit(config.run_uri), audit_rollouts(config.run_uri)):
        assert proof is not None
        assert proof.ok, proof.summary()
    alone = rollout_run(tmp_path, "alone", f"steps={STEPS}", "rollouts.look_ahead=1")
    fit_local(alone)
    assert digest(config.run_uri).state == digest(alone.run_uri).state


def test_turns_have_the_same_bits_for_any_number_of_generators_and_trainers(tmp_path: Path):
    """The answers talk to an environment; one run is in this process, the other has two processes of each kind."""
    game = ("rollouts.environment={kind: guess_number, turn_tokens: 2, turns: 3, turn_end: '', none: 'no '}",
            "rollouts.answer_tokens=11", "steps=8")
    alone = rollout_run(tmp_path, "alone", *game)
    fit_local(alone)
    config = rollout_run(tmp_path, "two", *game, "rollouts.generators.processes=2", "elastic.min_workers=2")
    with LocalCluster(nodes=4, cpus_per_node=1) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            assert fit(config).steps == 8
        finally:
            ray.shutdown()
    assert digest(config.run_uri).state == digest(alone.run_uri).state
    for run in (alone, config):
        proof = audit_rollouts(run.run_uri)
        assert proof is not None
        assert proof.ok, proof.summary()


def first(pool: RayPool) -> Group:
    """Return the first group that is done."""
    group = None
    while group is None:
        group = pool.next(1.0)
    return group


def test_generators_that_cannot_start_end_the_run_with_the_reason():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        pool = RayPool(({}, [], {}, 8), GeneratorsConfig(), lambda kind, **_: None)
        with pytest.raises(RolloutError, match="a generator cannot start"):
            first(pool)
        pool.close()
    finally:
        ray.shutdown()
