"""Records of how an output was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.plain_execution import without_ray
from tidewheel.config import build
from tidewheel.data import pipeline
from tidewheel.data.config import PipelineConfig
from tidewheel.data.stages import origin
from tidewheel.report.pipeline import write_pipeline_report
from tidewheel.shards.growing import identity
from tidewheel.shards.manifest import parse_manifest, read_manifest
from tidewheel.storage import store


def recipe(**changes: Any) -> PipelineConfig:
    return build(PipelineConfig, {
        "name": "small", "partitions": 1, "read": {"paths": ["*.jsonl"]}, "steps": [
            {"filter": {"gopher_quality": {"min_words": 5}}}, "dedup_exact",
            {"tokenize": {"train": {"vocabulary_size": 300}}}, {"pack": {"sequence_length": 16}}], **changes})


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    (folder / "in").mkdir()
    for number in range(2):
        texts = [f"the {place} words of document {number} and that is it" for place in range(20)]
        lines = [json.dumps({"id": f"{number}-{place}", "text": text}) for place, text in enumerate(texts)]
        (folder / f"in/{number}.jsonl").write_text("\n".join(lines))
    with without_ray():
        pipeline.run(recipe(), input=str(folder / "in"), output=str(folder / "out"))
    return folder / "out"


def test_recipe_versions_and_inputs_are_in_the_output(output):
    made = origin.read(store(output))
    assert build(PipelineConfig, made["recipe"]).recipe_hash() == made["recipe_hash"] == recipe().recipe_hash()
    assert made["recipe"]["steps"][0]["filter"]["gopher_quality"]["max_words"] == 100_000  # a default
    assert made["versions"]["pyarrow"]
    assert {"python", "tidewheel", "tokenizers"} <= made["versions"].keys()
    lines = origin.read_inputs(store(output))
    assert [line["file"] for line in lines] == ["0.jsonl", "1.jsonl"]
    assert made["input"].items() >= {"files": 2, "bytes": sum(line["bytes"] for line in lines)}.items()
    assert made["input"]["hash"] == store(output).hash("inputs.jsonl")


def test_the_recipe_of_a_shard_set_is_not_part_of_its_identity(output):
    manifest = read_manifest(store(output / "shards"))
    assert build(PipelineConfig, manifest.recipe).recipe_hash() == manifest.recipe_hash
    values = manifest.canonical()
    del values["recipe"]
    before = parse_manifest(values, "as an earlier version wrote it")
    assert (before.hash, identity(before)) == (manifest.hash, identity(manifest))
    assert before.recipe == {}


def test_the_report_shows_the_origin(output):
    write_pipeline_report(str(output))
    page = (output / "report.html").read_text()
    assert "How it was made" in page
    assert "min_words: 5" in page
    assert "pyarrow" in page


def test_passwords_are_not_written():
    config = recipe(read={"paths": ["s3://user:secret@bucket/*.jsonl"]})
    assert "secret" not in yaml.safe_dump(origin.settings_of(config))


def test_an_added_step_does_not_make_later_steps_differ():
    steps = recipe().canonical()["steps"]
    more = recipe(steps=[{"dedup_url": {}}, *steps[:1], *steps[2:]], seed=1)
    result = origin.differences(origin.settings_of(recipe()), origin.settings_of(more))
    assert ("seed", 0, 1) in result
    order = ["filter", "dedup_exact", "tokenize", "pack"]
    assert ("steps", order, ["dedup_url", "filter", "tokenize", "pack"]) in result
    assert {name.partition(".")[0] for name, _, _ in result} == {"seed", "steps", "dedup_url", "dedup_exact"}
