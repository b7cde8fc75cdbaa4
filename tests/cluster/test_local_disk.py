"""All processes of a run are killed, the memory agents too; it goes on from the nodes' disks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

from tests.cluster.test_elastic import DRIVER, events, settings
from tests.cluster.test_elastic import shards as shards
from tidewheel.checkpoint.digest import digest
from tidewheel.checkpoint.verify import list_checkpoints
from tidewheel.cluster.local import LocalCluster
from tidewheel.elastic.trainer import fit, fit_local
from tidewheel.storage import store
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig

pytestmark = [pytest.mark.cluster, pytest.mark.long]  # `test_local_disk.py` of the memory tier has the agents alone
SAVED, STEPS = 30, 60
WAIT_SECONDS = 600.0


def on_disk(folder: Path) -> int:
    """Return the newest step of which both ranks' parts are on the disk; 0 without one."""
    ranks: dict[int, set[str]] = {}
    for path in folder.rglob("step_*.safetensors"):
        step, rank = re.findall(r"step_(\d+)-g\d+-r(\d+)", path.name)[0]
        ranks.setdefault(int(step), set()).add(rank)
    return max((step for step, known in ranks.items() if known == {"0", "1"}), default=0)


def committed(config: TrainConfig) -> int:
    """Return the step of the newest checkpoint in storage."""
    return max((info.step for info in list_checkpoints(store(config.run_uri).child("checkpoints")) if info.committed),
               default=0)


def test_every_process_is_killed_and_the_run_goes_on_from_the_local_disks(shards, tmp_path):
    def config(run_id: str) -> TrainConfig:
        return settings(shards, tmp_path, run_id, steps=STEPS, reproducible=True, checkpoint={
            "every_steps": SAVED, "memory_tier": {"every_steps": 1},
            "local_disk": {"folder": str(tmp_path / "nvme"), "every_steps": 3}},
            elastic={"min_workers": 2, "max_workers": 2})

    killed, undisturbed = config("killed"), config("undisturbed")
    file = tmp_path / "train.yaml"
    file.write_text(json.dumps(killed.canonical()))  # JSON is YAML
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "platform"), str(root)])}
    with LocalCluster(nodes=2, cpus_per_node=1) as cluster:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, cluster.address, str(file), str(tmp_path / "hurry")],
            stdout=subprocess.DEVNULL, env=environment)
        until = time.monotonic() + WAIT_SECONDS
        while not (committed(killed) == SAVED and on_disk(tmp_path / "nvme") > SAVED):
            assert time.monotonic() < until, events(killed, "failure", "local_disk_failed")
            time.sleep(0.05)
        driver.kill()
        driver.wait(timeout=WAIT_SECONDS)
    newest = on_disk(tmp_path / "nvme")  # nothing runs any more
    assert committed(killed) == SAVED < newest < STEPS
    with LocalCluster(nodes=2, cpus_per_node=1) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            assert fit(killed).steps == STEPS
        finally:
            ray.shutdown()
    resume = events(killed, "resume")[-1]["detail"]
    assert (resume["step"], resume["tier"]) == (newest, "disk")
    audited = audit(killed.run_uri)
    assert audited.ok, audited.summary()
    fit_local(undisturbed)
    last = f"checkpoints/step_{STEPS:08d}"
    ends = [next(info.name for info in list_checkpoints(store(run.run_uri).child("checkpoints")) if info.step == STEPS)
            for run in (killed, undisturbed)]
    assert digest(f"{killed.run_uri}/checkpoints/{ends[0]}") == digest(f"{undisturbed.run_uri}/{last}"), ends
    assert not list((tmp_path / "nvme").rglob("*.safetensors")), "the run is over"
