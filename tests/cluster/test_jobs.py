"""The jobs as `ray job submit` runs them, against a real job server: logs, exit codes, resuming."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidewheel.cluster.local import LocalCluster
from tidewheel.demo.corpus import build_corpus
from tidewheel.storage import store

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(nodes=2, dashboard=True) as running:
        yield running


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    build_corpus(store(folder / "raw"), max_bytes=600_000)
    return folder


def submit(cluster: LocalCluster, *command: str) -> subprocess.CompletedProcess[str]:
    """`ray job submit --working-dir . -- COMMAND`, as the README has it."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment |= cluster.client_environment
    return subprocess.run(
        [str(BIN / "ray"), "job", "submit", "--address", cluster.dashboard_url, "--working-dir", ".", "--", *command],
        cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300,
        check=False)


def test_prepare_data_then_train_then_resume(cluster, place):
    prepared = submit(cluster, "python", "-m", "jobs.prepare_data", "--config", "pipelines/demo.yaml",
                      "--input", str(place / "raw"), "--output", str(place / "clean"))
    assert prepared.returncode == 0, prepared.stdout
    assert "shards:" in prepared.stdout  # the logs reach the one who submits
    assert (place / "clean/shards/manifest.json").is_file()

    command = ["python", "-m", "jobs.train", "--config", "jobs/configs/demo.yaml",
               "--set", f"data.uri={place}/clean/shards", "--set", f"data.validation={place}/clean/validation",
               "--set", f"run.uri={place}/runs", "--set", "run.id=job", "--set", "checkpoint.every_steps=2",
               "--set", "model={dim: 32, num_layers: 1, num_heads: 2, tie_embeddings: true}"]
    trained = submit(cluster, *command, "--set", "steps=3")
    assert trained.returncode == 0, trained.stdout
    assert "3 steps" in trained.stdout

    resumed = submit(cluster, *command, "--set", "steps=3")  # a finished run: nothing left to do
    assert resumed.returncode == 0, resumed.stdout


def test_a_mistake_gives_exit_code_and_message(cluster, place):
    failed = submit(cluster, "python", "-m", "jobs.prepare_data", "--config", "pipelines/demo.yaml",
                    "--input", str(place / "nowhere"), "--output", str(place / "never"))
    assert failed.returncode != 0
    assert "mend:" in failed.stdout
    assert "Traceback" not in failed.stdout
    assert not (place / "never/shards").exists()
