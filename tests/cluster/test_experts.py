"""Workers that share experts lose a node and gain one, on a real cluster with a real SIGKILL.

The bits are those of one worker that holds all experts and is never disturbed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from tests.cluster.test_elastic import events, settings, shards, unhurried  # noqa: F401
from tidewheel.checkpoint.digest import digest
from tidewheel.cluster.local import LocalCluster
from tidewheel.elastic.trainer import fit_local, run_workers
from tidewheel.train.audit import audit

pytestmark = [pytest.mark.cluster, pytest.mark.long]

STEPS = 60
COMMON: dict[str, Any] = {
    "steps": STEPS, "reproducible": True,
    "model": {"kind": "mixtral", "dim": 32, "num_layers": 2, "num_heads": 4, "ffn_dim": 44, "num_experts": 4,
              "experts_per_token": 2, "balancing": "bias", "tie_embeddings": True},
    "batch": {"global_sequences": 16, "micro_sequences": 4, "virtual_ranks": 4}}


def test_a_kill_and_a_join_do_not_change_the_bits(shards: str, tmp_path: Path):  # noqa: F811
    hurry = tmp_path / "hurry"
    config = settings(shards, tmp_path, "elastic", **COMMON, parallel={"data": "zero3", "expert": 2},
                      elastic={"min_workers": 2, "max_workers": 4, "join_wait_seconds": 0.5,
                               "resize_interval_seconds": 1})
    sizes: list[int] = []
    with LocalCluster(nodes=4, cpus_per_node=1) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        killed: list[int] = []
        added: list[int] = []

        def on_progress(progress: dict[str, Any]) -> None:
            size, step = progress.get("world_size", 0), progress.get("step", 0)
            if size and (not sizes or sizes[-1] != size):
                sizes.append(size)
            if size == 4 and step >= 10 and not killed:
                killed.append(step)
                cluster.kill_node(cluster.nodes[-1])
            if killed and size == 2 and step >= killed[0] + 5 and not added:
                added.append(step)
                cluster.add_node()
            if added and size == 4:
                hurry.touch()

        try:
            result = run_workers(config, unhurried(STEPS, hurry), on_progress)
        finally:
            ray.shutdown()
    assert result.steps == STEPS
    assert sizes[-3:] == [4, 2, 4], sizes
    audited = audit(config.run_uri)
    assert audited.ok, audited.summary()
    assert events(config, "node_lost")
    assert events(config, "node_joined")
    alone = settings(shards, tmp_path, "alone", **COMMON)
    reference = fit_local(alone)
    assert (result.loss, result.tokens) == (reference.loss, reference.tokens)
    assert digest(config.run_uri).state == digest(alone.run_uri).state
