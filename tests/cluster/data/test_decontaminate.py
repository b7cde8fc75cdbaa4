"""Decontamination on a real Ray cluster: drop, cut, annotate, `fail_above`, and the check of the packed rows."""

from __future__ import annotations

import json
import random

import pytest

from tests.cluster.data.test_pipeline import documents_of, words
from tidewheel.config import build
from tidewheel.data import pipeline
from tidewheel.data.config import PipelineConfig
from tidewheel.errors import InputError
from tidewheel.report.pipeline import write_pipeline_report
from tidewheel.shards.lineage import lineage
from tidewheel.storage import store

pytestmark = pytest.mark.cluster
ITEMS = {
    "q1": "Which of the planets beyond the belt has the faintest ring and was first drawn by a clockmaker from Bremen?",
    "q2": "How many crates of oranges did the second train unload at the lighthouse before the ferry left for Birch?",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decontaminate") / "in"
    (folder / "evals").mkdir(parents=True)
    generator = random.Random(4)
    lines = []
    for number in range(40):
        text = [" ".join(words(generator, 120)), " ".join(words(generator, 120))]
        planted = {3: ITEMS["q1"], 4: ITEMS["q1"].upper(), 5: ITEMS["q2"].replace("second", "other")}.get(number)
        lines.append({"id": f"d{number:02d}", "text": f" {planted} ".join(text) if planted else " ".join(text)})
    lines.append({"id": "only", "text": ITEMS["q2"]})
    (folder / "documents.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "evals" / "quiz.jsonl").write_text("".join(
        json.dumps({"id": name, "question": text}) + "\n" for name, text in ITEMS.items()))
    return folder


def config(**step) -> PipelineConfig:
    return build(PipelineConfig, {
        "read": {"paths": ["*.jsonl"]}, "partitions": 2, "steps": [
            {"decontaminate": {"evals": ["evals/"], **step}},
            {"tokenize": {"train": {"vocabulary_size": 400, "sample_bytes": 20_000}}},
            {"pack": {"sequence_length": 256, "validation_fraction": 0.1}}]})


def run(source, output, **step) -> dict:
    return pipeline.run(config(**step), input=str(source), output=str(output)).value


HIT = {"d03", "d04", "d05", "only"}


def test_drop_removes_contaminated_documents(cluster, source, tmp_path):
    summary = run(source, tmp_path)
    assert not HIT & set(documents_of(tmp_path))
    result = summary["contamination"]
    assert (result["documents"], result["documents_in"], result["action"]) == (4, 41, "drop")
    assert result["benchmarks"] == {"quiz": {"items": 2, "items_found": 2, "documents": 4}}
    assert [(row["item"], row["documents"]) for row in result["top"]] == [("q1", 2), ("q2", 2)]
    assert result["top"][0]["match"].lower() == ITEMS["q1"].lower().rstrip("?")
    assert result["packed"]["found"] == 0
    assert result["packed"]["segments"] >= 37
    row = next(row for row in lineage(store(str(tmp_path)), "d05", packed=False)["verdicts"] if row["reason"])
    assert (row["verdict"], row["reason"], row["detail"]["item"]) == ("drop", "contaminated", "q2")
    assert 0.8 < row["score"] < 1
    page = (tmp_path / write_pipeline_report(str(tmp_path)).rpartition("/")[2]).read_text()
    assert "Items found in most documents" in page
    again = run(source, tmp_path)
    assert again["contamination"] == result


def test_cut_removes_the_matches(cluster, source, tmp_path):
    summary = run(source, tmp_path, action="cut")
    left = documents_of(tmp_path)
    assert HIT - set(left) == {"only"}  # nothing is left of that one
    assert all(ITEMS["q1"].lower() not in text.lower() for text in left.values())
    assert left["d03"].count("\n\n") == 1
    stage = next(entry for entry in summary["stages"] if entry["name"] == "decontaminate")
    assert (stage["dropped"], stage["edits"], stage["edited"]) == ({"contaminated": 1}, {"contaminated_cut": 3}, 3)
    assert summary["contamination"]["packed"]["found"] == 0
    assert summary["samples"]["decontaminate"]["contaminated_cut"][0]["after"]


def test_annotate_keeps_everything_and_the_packed_check_reports_it(cluster, source, tmp_path):
    summary = run(source, tmp_path, action="annotate")
    assert set(documents_of(tmp_path)) >= HIT
    stage = next(entry for entry in summary["stages"] if entry["name"] == "decontaminate")
    assert (stage["dropped"], stage["documents_out"]) == ({}, 41)
    row = next(row for row in lineage(store(str(tmp_path)), "d04", packed=True)["verdicts"] if row["reason"])
    assert (row["verdict"], row["reason"]) == ("keep", "contaminated")
    packed = summary["contamination"]["packed"]
    assert {match["id"] for match in packed["matches"]} == HIT
    assert packed["found"] >= 4
    write_pipeline_report(str(tmp_path))


def test_a_run_above_fail_above_publishes_nothing(cluster, source, tmp_path):
    with pytest.raises(InputError, match=r"4 of 41 .* 0.05 \(quiz in 4\)"):
        run(source, tmp_path, fail_above=0.05)
    assert not (tmp_path / "shards" / "manifest.json").exists()
    assert not (tmp_path / "summary.json").exists()
    with pytest.raises(InputError):
        pipeline.run(config(fail_above=0.5), input=str(source), output=str(tmp_path), fail_above=0.01)
    assert run(source, tmp_path, fail_above=0.5)["contamination"]["documents"] == 4
