"""The jobs as `ray job submit` and the SDK run them, against a real job server: logs, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tidewheel as tw
from tidewheel.cluster.local import LocalCluster
from tidewheel.demo.corpus import build_corpus
from tidewheel.storage import store

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
MODEL = {"dim": 32, "num_layers": 1, "num_heads": 2, "tie_embeddings": True}
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")

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


def test_prepare_data_then_train(cluster, place):
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


def test_a_mistake_gives_exit_code_and_message(cluster, place):
    failed = submit(cluster, "python", "-m", "jobs.prepare_data", "--config", "pipelines/demo.yaml",
                    "--input", str(place / "nowhere"), "--output", str(place / "never"))
    assert failed.returncode != 0
    assert "mend:" in failed.stdout
    assert "Traceback" not in failed.stdout
    assert not (place / "never/shards").exists()


def test_a_workflow_of_the_sdk_is_submitted_then_found_done(cluster, tmp_path):
    """Run again, it does nothing."""
    from ray.job_submission import JobSubmissionClient

    build_corpus(store(tmp_path / "raw"), max_bytes=600_000)
    corpus = (
        tw.Pipeline("small").set(partitions=2)
        .read("corpus/*.jsonl")
        .filter(tw.filters.gopher_quality())
        .dedup_exact()
        .dedup_near()
        .decontaminate("evals/*.jsonl")
        .tokenize(train={"vocabulary_size": 512, "sample_bytes": 200_000})
        .pack(sequence_length=64, validation_fraction=0.1)
    )
    run = tw.Train({"run": {"id": "small"}, "model": MODEL, "steps": 4, "precision": "fp32",
                    "batch": {"global_sequences": 4, "micro_sequences": 2, "virtual_ranks": 2}}, data=corpus)
    flow = tw.Workflow("first", corpus, run)
    output, raw = str(tmp_path / "out"), str(tmp_path / "raw")
    job = flow.submit(cluster.dashboard_url, output, input=raw)
    client = JobSubmissionClient(cluster.dashboard_url)
    until = time.monotonic() + 200
    while client.get_job_status(job) not in ENDED and time.monotonic() < until:
        time.sleep(1)
    assert client.get_job_status(job) == "SUCCEEDED", client.get_job_logs(job)
    assert [row["state"] for row in flow.plan(output)] == ["published", "finished"]
    again = flow.run(output, input=raw, address=cluster.address)
    assert all(stage["units"] == stage["units_reused"] for stage in again.pipelines["small"].value["stages"])
    assert again.runs["small"].steps == 4
    assert again.runs["small"].validation_loss is not None
