"""The rendered sbatch script trains on two "nodes", saves when Slurm ends the job, and resumes when it is requeued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.unit.launch import stand_ins
from tests.unit.train.helpers import config, write_shards
from tidewheel import jsonlog
from tidewheel.launch import slurm
from tidewheel.storage import store
from tidewheel.train.audit import audit

pytestmark = [pytest.mark.cluster, pytest.mark.long]
STEPS = 60


def script(folder: Path, **changes) -> Path:
    """Write shards, and the script of a run of 60 steps on two nodes of one CPU."""
    write_shards(folder / "shards")
    write_shards(folder / "validation", shards=1, seed=1)
    settings = config(folder, "run", f"steps={STEPS}", "elastic.min_workers=2", "checkpoint.every_steps=20",
                      "reproducible=true", "data.verify=false")
    path = folder / "job.sh"
    path.write_text(slurm.render(slurm.Slurm(settings, nodes=2, cpus=1, **changes)))
    return path


def environment(folder: Path, job: int) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "SLURM"))}
    return {**kept, **stand_ins.install(folder / "bin"), "SLURM_JOB_ID": str(job), "SLURM_JOB_NUM_NODES": "2",
            "SLURM_SUBMIT_DIR": str(folder)}


def steps(folder: Path) -> list[int]:
    run = store(folder / "runs/run")
    return [line["step"] for line in jsonlog.read(run, "metrics.jsonl")] if run.exists("run.json") else []


def test_two_nodes_train_stop_on_notice_and_resume(tmp_path):
    job, variables = script(tmp_path), environment(tmp_path, os.getpid() % 10_000)
    with (tmp_path / "first.log").open("w") as log:
        batch = subprocess.Popen(["bash", str(job)], cwd=tmp_path, env=variables, stdout=log, stderr=log)
        while batch.poll() is None and len(steps(tmp_path)) < 5:
            time.sleep(0.5)
        batch.send_signal(signal.SIGUSR1)  # --signal=B:USR1@120
        code = batch.wait(300)
    log_text = (tmp_path / "first.log").read_text()
    assert code == 143, log_text
    assert f"scontrol requeue {variables['SLURM_JOB_ID']}" in (tmp_path / "bin/scontrol.log").read_text()
    done = max(steps(tmp_path))
    assert 5 <= done < STEPS, log_text

    again = subprocess.run(["bash", str(job)], cwd=tmp_path, env=variables, timeout=600, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
    assert max(steps(tmp_path)) == STEPS
    assert audit(str(tmp_path / "runs/run")).ok
    events = jsonlog.read(store(tmp_path / "runs/run"), "events.jsonl")
    assert any(event["kind"] == "resume" for event in events), json.dumps(events)
    assert not (tmp_path / f".tidewheel-slurm/{variables['SLURM_JOB_ID']}/token").exists()


def test_the_exit_code_of_a_user_error_is_the_jobs(tmp_path):
    job, variables = script(tmp_path), environment(tmp_path, os.getpid() % 10_000 + 1)
    for path in (tmp_path / "shards").iterdir():
        path.unlink()
    done = subprocess.run(["bash", str(job)], cwd=tmp_path, env=variables, timeout=600, capture_output=True, text=True)
    assert done.returncode == 2, done.stdout + done.stderr
    assert not (tmp_path / "bin/scontrol.log").exists()
