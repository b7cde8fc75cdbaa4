"""PPO with two trainers and two generators on a cluster has the bits of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from tests.unit.post.runs import rollout_run
from tidewheel.checkpoint.digest import digest
from tidewheel.cluster.local import LocalCluster
from tidewheel.elastic.trainer import fit, fit_local
from tidewheel.post.audit import audit_rollouts

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]

PPO = ("objective.kind=ppo", "rollouts.advantage=gae", "rollouts.kl_weight=0.02", "rollouts.look_ahead=1", "steps=6",
       "elastic.start_timeout_seconds=300")


def test_the_bits_do_not_depend_on_the_number_of_workers(tmp_path: Path):
    several = rollout_run(tmp_path, "several", *PPO, "rollouts.generators.processes=2", "elastic.min_workers=2")
    with LocalCluster(nodes=4, cpus_per_node=1) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            fit(several)
        finally:
            ray.shutdown()
    alone = rollout_run(tmp_path, "alone", *PPO)
    fit_local(alone)
    assert digest(several.run_uri).state == digest(alone.run_uri).state
    proof = audit_rollouts(several.run_uri)
    assert proof is not None
    assert proof.ok, proof.summary()
