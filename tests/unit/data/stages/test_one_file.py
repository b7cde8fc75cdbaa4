"""`--input FILE`."""

from __future__ import annotations

from typing import Any

import pytest

from tidewheel.cluster.s3_server import S3Server
from tidewheel.config import build
from tidewheel.data.config import PipelineConfig
from tidewheel.data.stages.resolve import content, resolve
from tidewheel.storage import store


def recipe(**changes: Any) -> PipelineConfig:
    return build(PipelineConfig, {"read": {"paths": ["corpus/*.jsonl"]}, "steps": [
        {"tokenize": {"train": {}}}, "pack"], **changes})


@pytest.mark.parametrize("name", ["books.jsonl", "odd [1]*.jsonl"])
def test_an_input_file_replaces_the_files_of_the_recipe(name, tmp_path):
    for file in (name, "odd 1x.jsonl", "other.jsonl"):
        (tmp_path / file).write_text('{"text": "some words"}\n')
    job = resolve(recipe(), input=str(tmp_path / name), output=str(tmp_path / "out"))
    assert [file.name for file in job.files] == [name]
    assert job.input == str(tmp_path)
    assert job.config.recipe_hash() != recipe().recipe_hash()  # another file is another recipe
    assert [file[0] for file in content(recipe(), input=str(tmp_path / name), output="out")["files"]] == [name]


def test_absolute_paths_are_read_beside_an_input_file(tmp_path):
    for file in ("a.jsonl", "b.jsonl"):
        (tmp_path / file).write_text('{"text": "some words"}\n')
    config = recipe(read={"paths": ["corpus/*.jsonl", str(tmp_path / "b.jsonl")]})
    job = resolve(config, input=str(tmp_path / "a.jsonl"), output=str(tmp_path / "out"))
    assert [file.name for file in job.files] == [str(tmp_path / "b.jsonl"), "a.jsonl"]


def test_an_object_can_be_the_input_file(tmp_path):
    with S3Server() as server:
        bucket = server.create_bucket("one")
        store(bucket).write("raw/a.jsonl", b'{"text": "some words"}\n')
        store(bucket).write("raw/b.jsonl", b'{"text": "some words"}\n')
        job = resolve(recipe(), input=f"{bucket}/raw/a.jsonl", output=str(tmp_path / "out"))
        assert [file.name for file in job.files] == ["a.jsonl"]
