"""No file, report or error of a pipeline or a training run contains a planted credential."""

from __future__ import annotations

import json
import random

import pytest

from tests.plain_execution import without_ray
from tests.unit.train.helpers import FileCheckpoints, config, write_shards
from tidewheel import cli
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.cluster.s3_server import S3Server
from tidewheel.config import build
from tidewheel.data import pipeline
from tidewheel.data.config import PipelineConfig
from tidewheel.errors import TidewheelError
from tidewheel.report.pipeline import write_pipeline_report
from tidewheel.report.run import write_run_report
from tidewheel.storage import store
from tidewheel.train.loop import train
from tidewheel.train.runtime import Runtime

PLANTED = "pLaNtEd0cReDeNtIaL7391"
NAMES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "WANDB_API_KEY", "HF_TOKEN", "RAY_AUTH_TOKEN")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch):
    with S3Server() as server:  # accepts any credentials
        server.create_bucket("private")
        for name in NAMES:
            monkeypatch.setenv(name, PLANTED)
        yield "s3://private"


def objects_in(uri: str) -> dict[str, bytes]:
    remote = store(uri)
    return {entry.key: remote.read(entry.key) for entry in remote.list()}


def test_the_search_finds_a_planted_secret(bucket: str):
    store(bucket).write("run/log.jsonl", f'{{"key": "{PLANTED}"}}'.encode())
    assert [key for key, content in objects_in(bucket).items() if PLANTED.encode() in content] == ["run/log.jsonl"]


def test_no_file_of_a_pipeline_or_a_run_holds_the_secret(bucket: str, tmp_path):
    generator = random.Random(0)
    words = ["the", "of", "and", "to", "that", "with", "have", "be", "river", "harbour", "lantern", "meadow", "copper"]
    records = [{"id": f"{index}", "text": " ".join(generator.choices(words, k=120))} for index in range(40)]
    lines = [*(json.dumps(record) for record in records), "{broken"]
    store(bucket).write("raw/documents.jsonl", "\n".join(lines).encode())
    recipe = build(PipelineConfig, {
        "name": "secrets", "partitions": 2, "max_bad_fraction": 0.5, "read": {"paths": ["raw/*.jsonl"]},
        "steps": ["dedup_exact", {"tokenize": {"train": {"vocabulary_size": 300, "sample_bytes": 20_000}}},
                  {"pack": {"sequence_length": 32, "validation_fraction": 0.2}}]})
    with without_ray():
        pipeline.run(recipe, input=bucket, output=f"{bucket}/out")
    write_pipeline_report(f"{bucket}/out")

    write_shards(tmp_path / "shards")
    write_shards(tmp_path / "validation", shards=1, rows=11, seed=1)
    settings = config(tmp_path, "run", f"run.uri={bucket}/runs", "metrics.trackers=[tensorboard]")
    checkpoints = CheckpointManager(store(settings.run_uri).child("checkpoints"))
    train(settings, Runtime(checkpoints=checkpoints))
    write_run_report(settings.run_uri)

    contents = objects_in(bucket)
    assert {"out/summary.json", "out/report.html", "runs/run/run.json", "runs/run/result.json",
            "runs/run/report.html"} <= contents.keys()
    assert any(key.startswith("out/quarantine") for key in contents)
    assert any(key.endswith("manifest.json") and "checkpoints" in key for key in contents)
    assert not [key for key, content in contents.items() if PLANTED.encode() in content]


@pytest.mark.parametrize("arguments", [
    ["train", "--set", "data.uri=s3://private/nothing"], ["shards", "verify", "s3://missing-bucket/shards"],
    ["data", "run", "pipelines/demo.yaml", "--input", "s3://missing-bucket", "--output", "s3://private/out"],
    ["checkpoint", "list", "s3://private/no-run"], ["doctor", "--json", "--storage", "s3://private"]])
def test_no_message_holds_the_secret(bucket: str, arguments: list[str], capfd: pytest.CaptureFixture[str]):
    cli.run_command(arguments)
    output = "".join(capfd.readouterr())
    assert output
    assert PLANTED not in output


def test_an_error_names_the_location_without_user_and_password(tmp_path):
    settings = config(tmp_path, "run", f"data.uri=s3://user:{PLANTED}@private/shards")
    with pytest.raises(TidewheelError) as raised:
        train(settings, Runtime(checkpoints=FileCheckpoints(tmp_path / "c.npz")))
    assert PLANTED not in str(raised.value)
