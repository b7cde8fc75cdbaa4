"""User errors on the command line: a clear message, exit code 2, no traceback, no partial output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.train.helpers import write_shards
from tidewheel.cli import run_command
from tidewheel.cluster.s3_server import S3Server

pytestmark = pytest.mark.cluster
RECIPE = """
name: bad
read: {paths: ["*.jsonl"]}
partitions: 2
max_bad_fraction: 0.2
steps:
  - dedup_exact: {}
  - tokenize: {train: {vocabulary_size: 300, sample_bytes: 100000}}
  - pack: {sequence_length: 16}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return str(path)


def refused(capsys, *command: str) -> str:
    assert run_command(command) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    assert "fix:" in captured.err
    return " ".join(captured.err.split())


def lines(folder: Path, *records: bytes) -> str:
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b"\n".join(records) + b"\n")
    return str(folder)


def good(number: int) -> bytes:
    return json.dumps({"id": f"d{number}", "text": f"document number {number} has words of its own"}).encode()


def test_more_bad_records_than_allowed_stop_the_run(recipe, tmp_path, capsys, cluster):
    source = lines(tmp_path / "in", *(good(n) for n in range(6)), b"{not json", b'{"id": "x"}',
                   b'{"id": "y", "text": "\xff\xfe"}')
    output = tmp_path / "out"
    error = refused(capsys, "data", "run", recipe, "--input", source, "--output", str(output))
    assert "a.jsonl" in error  # the worst file
    assert not (output / "shards").exists()


def test_a_few_bad_records_go_to_quarantine_with_position_and_reason(recipe, tmp_path, capsys, cluster):
    source = lines(tmp_path / "in", *(good(n) for n in range(60)), b"{not json", b'{"id": "x"}',
                   b'{"id": "y", "text": "\xff\xfe"}')
    (tmp_path / "in" / "empty.jsonl").write_bytes(b"")
    output = tmp_path / "out"
    assert run_command(["data", "run", recipe, "--input", source, "--output", str(output)]) == 0
    capsys.readouterr()
    results = [json.loads(line) for path in (output / "quarantine").glob("*.jsonl")
             for line in path.read_text().splitlines()]
    assert {entry["reason"] for entry in results} == {"invalid_json", "missing_text", "wrong_encoding", "empty_file"}
    assert all(entry["file"] for entry in results)
    assert json.loads((output / "summary.json").read_text())["quarantine"]["invalid_json"] == 1


def test_a_missing_input_raises(recipe, tmp_path, capsys):
    error = refused(capsys, "data", "run", recipe, "--input", str(tmp_path / "nowhere"),
                    "--output", str(tmp_path / "o"))
    assert "nowhere" in error
    assert not (tmp_path / "o").exists()


def test_a_missing_bucket_raises(recipe, capsys):
    with S3Server():
        error = refused(capsys, "data", "run", recipe, "--input", "s3://no-such-bucket/raw",
                        "--output", "s3://nor-this/o")
    assert "no-such-bucket" in error


def test_wrong_credentials_raise(recipe, capsys):
    with S3Server(accept_all=False):
        told = refused(capsys, "data", "run", recipe, "--input", "s3://private/raw", "--output", "s3://private/o")
    assert "AWS_ACCESS_KEY_ID" in told


def test_more_workers_than_cpus_raise(tmp_path, capsys, cluster):
    write_shards(tmp_path / "shards")
    path = tmp_path / "train.yaml"
    path.write_text(f"run: {{id: r, uri: {tmp_path}/runs}}\ndata: {{uri: {tmp_path}/shards}}\nsteps: 2\n"
                    "batch: {global_sequences: 8, micro_sequences: 2, virtual_ranks: 4}\n"
                    "elastic: {min_workers: 4, max_workers: 4}\n")
    error = refused(capsys, "train", str(path))
    assert "4 worker" in error
    assert not (tmp_path / "runs/r/run.json").exists()


@pytest.mark.parametrize(("setting", "word"), [("data.uri=", "data.uri"), ("data.uri=/nowhere", "/nowhere"),
                                               ("model.vocabulary_size=5", "vocabulary_size"),
                                               ("batch.global_sequences=7", "multiple")])
def test_training_that_cannot_start_says_why(setting, word, tmp_path, capsys):
    write_shards(tmp_path / "shards")
    path = tmp_path / "train.yaml"
    path.write_text(f"run: {{id: r, uri: {tmp_path}/runs}}\ndata: {{uri: {tmp_path}/shards}}\nsteps: 2\n")
    assert word in refused(capsys, "train", str(path), "--set", setting)
    assert not (tmp_path / "runs").exists()
