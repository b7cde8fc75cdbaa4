"""Jobs through `ray job submit` and the SDK, against a real job server: logs and exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tidewheel as tw
from tests.cluster.jobs import submitting
from tests.own_parts import overrides, without_sevens, write_parts
from tidewheel.checkpoint.verify import list_checkpoints
from tidewheel.cluster.jobs import JobServer
from tidewheel.cluster.local import LocalCluster
from tidewheel.demo.corpus import build_corpus
from tidewheel.jsonlog import read
from tidewheel.storage import store

ROOT = Path(__file__).parents[2]
FEW_STEPS = ("partitions=1", "steps=[dedup_exact, {tokenize: {train: {vocabulary_size: 512, sample_bytes: 200000}}}, "
             "{pack: {sequence_length: 64}}]")
"""Settings of a pipeline that prepares data quickly; `test_demo.py` and the first page of the docs run all steps."""
MODEL = {"dim": 32, "num_layers": 1, "num_heads": 2, "tie_embeddings": True}

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(nodes=2, dashboard=True) as running:
        yield running


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    build_corpus(store(folder / "raw"), max_bytes=600_000)
    return folder


def submit(cluster: LocalCluster, *command: str) -> tuple[int, str]:
    """Run a job to its end; return its exit code and output."""
    job = submitting(cluster, *command)
    output, _ = job.communicate(timeout=600)
    return job.returncode, output


def test_data_is_prepared_then_a_training_of_own_parts_is_stopped_and_saves_first(cluster, place):
    """Use `ray job submit`, then `tidewheel submit`. `tidewheel job stop` sends SIGTERM, as `ray job stop` does.

    The training's model family, optimizer, schedule and objective are in the submitted folder.
    """
    code, output = submit(cluster, "python", "-m", "jobs.prepare_data", "--config", "pipelines/demo.yaml",
                          "--input", str(place / "raw"), "--output", str(place / "clean"),
                          *(word for setting in FEW_STEPS for word in ("--set", setting)))
    assert code == 0, output
    assert "shards:" in output  # the user sees the job's logs
    assert (place / "clean/shards/manifest.json").is_file()

    run, own = place / "runs/stopped", place / "own"
    own.mkdir()
    chosen = [word for setting in overrides(write_parts(own)) for word in ("--set", setting)]
    command = ["train", "--config", str(ROOT / "jobs/configs/demo.yaml"), *chosen,
               "--set", f"data.uri={place}/clean/shards",
               "--set", f"run.uri={place}/runs", "--set", "run.id=stopped", "--set", "checkpoint.every_steps=100000",
               "--set", "model.dim=32", "--set", "model.num_layers=1", "--set", "model.num_heads=2",
               "--set", "evaluation.sample_tokens=0", "--set", "steps=1000000"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment |= {**cluster.client_environment, "RAY_API_SERVER_ADDRESS": cluster.dashboard_url,
                    "PYTHONPATH": str(ROOT / "platform")}
    tidewheel = [sys.executable, "-m", "tidewheel.cli"]
    following = subprocess.Popen([*tidewheel, "submit", "--id", "to-stop", "--", *command],
                                 cwd=own, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until = time.monotonic() + 600
    while not read(store(run), "batches.jsonl"):
        assert following.poll() is None, following.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.2)
    stopped = subprocess.run([*tidewheel, "job", "stop", "to-stop"], env=environment, text=True, capture_output=True,
                             timeout=600, check=True)
    assert stopped.stdout == "to-stop: stopped\n"
    output, _ = following.communicate(timeout=600)
    assert following.returncode == 143, output
    assert "saved at step" in output
    saved = [found.step for found in list_checkpoints(store(run).child("checkpoints")) if found.complete]
    assert len(saved) == 1
    assert saved[0] >= 1
    assert set(store(run).read_json("run.json")["code"]) == {"model", "optimizer", "schedule", "objective"}


@pytest.mark.long  # `test_bad_input.py` tests the message, `test_background.py` a job's exit code
def test_a_mistake_gives_exit_code_and_message(cluster, place):
    code, output = submit(cluster, "python", "-m", "jobs.prepare_data", "--config", "pipelines/demo.yaml",
                          "--input", str(place / "nowhere"), "--output", str(place / "never"))
    assert code != 0
    assert "fix:" in output
    assert "Traceback" not in output
    assert not (place / "never/shards").exists()


@pytest.mark.long  # `tests/unit/workflow` runs every kind of step, and the test above submits a job
def test_a_workflow_of_the_sdk_is_submitted_then_found_done(cluster, tmp_path):
    """Two trainings share a corpus and a tokenizer and run at the same time on two nodes. A second run does nothing.

    The recipe uses a filter from the uploaded folder.
    """
    build_corpus(store(tmp_path / "raw"), max_bytes=600_000)
    tokenizer = tw.Tokenizer("bpe", "corpus/*.jsonl", vocabulary_size=512, sample_bytes=200_000)
    corpus = (
        tw.Pipeline("small").set(partitions=2)
        .read("corpus/*.jsonl")
        .filter(tw.filters.gopher_quality(), without_sevens)
        .dedup_exact()
        .tokenize(tokenizer)
        .pack(sequence_length=64, validation_fraction=0.1)
    )
    first, second = (tw.Train({"run": {"id": name}, "model": MODEL, "steps": 4, "seed": seed, "precision": "fp32",
                               "elastic": {"min_workers": 1, "max_workers": 2}, "evaluation": {"sample_tokens": 0},
                               "batch": {"global_sequences": 4, "micro_sequences": 2, "virtual_ranks": 2}}, data=corpus)
                     for seed, name in enumerate(("first", "second")))
    flow = tw.Workflow("sweep", first, second)
    output, raw = str(tmp_path / "out"), str(tmp_path / "raw")
    server = JobServer(cluster.dashboard_url, say=print)
    lines: list[str] = []
    assert server.follow(flow.submit(cluster.dashboard_url, output, input=raw), lines.append) == 0, "".join(lines)
    assert {row["step"]: row["state"] for row in flow.status(output, input=raw)} == dict.fromkeys(
        ("bpe", "small", "first", "second"), "published")
    assert {item.state for item in flow.plan(output, input=raw)} == {"published"}
    events = {name: read(store(record.place), "events.jsonl") for name, record in flow.run(
        output, input=raw, address="127.0.0.1:1").records.items() if record.kind == "train"}  # needs no cluster
    sizes = {name: [event["detail"]["world_size"] for event in found if event["kind"] == "start"]
             for name, found in events.items()}
    assert sizes == {"first": [1], "second": [1]}  # each training had one node
    done = flow.run(output, input=raw, address="127.0.0.1:1")
    assert done.runs["first"].steps == 4
    assert done.runs["first"].validation_loss is not None
    assert done.hashes["first"] != done.hashes["second"]  # same batches, other weights
