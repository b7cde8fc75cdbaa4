"""The SDK's composition on a real cluster: submitted to its job server, then run again, which does nothing."""

from __future__ import annotations

import time

import pytest

import tidewheel as tw
from tidewheel.cluster.local import LocalCluster
from tidewheel.demo.corpus import build_corpus
from tidewheel.storage import store

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
MODEL = {"dim": 32, "num_layers": 1, "num_heads": 2, "tie_embeddings": True}
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


def test_a_workflow_is_submitted_then_found_done(tmp_path):
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
    with LocalCluster(nodes=1, cpus_per_node=2, dashboard=True) as cluster:
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
