"""Filters that edit, before and after deduplication, and a step that only annotates, on a real Ray cluster."""

from __future__ import annotations

import json
import random
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.cluster.data.test_pipeline import documents_of, shard_hashes, words
from tidewheel.config import build
from tidewheel.data import pipeline
from tidewheel.data.config import FilterStep, PipelineConfig
from tidewheel.shards.lineage import lineage
from tidewheel.storage import store

pytestmark = pytest.mark.cluster
MAIL = "somebody@host.org"


def records() -> list[dict]:
    """Return documents of ten lines, some with menus, capitals or addresses."""
    generator = random.Random(3)
    made = []
    for number in range(60):
        lines = [" ".join(words(generator, 12)) for _ in range(10)]
        if number % 4 == 0:
            lines.insert(3, "12 likes")
        if number % 5 == 0:
            lines.insert(5, f"write to {MAIL} or call")
        if number % 7 == 0:
            lines[1] = " ".join(words(generator, 40)).upper()  # more than a twentieth of the words
        made.append({"id": f"d{number:02d}", "text": "\n".join(lines)})
    for number in (1, 2, 3):  # equal once the menu line is gone
        made.append({"id": f"menu-{number}", "text": f"3 likes\n{made[number]['text']}"})
    return made


def config(*steps) -> PipelineConfig:
    return build(PipelineConfig, {
        "read": {"paths": ["*.jsonl"]}, "partitions": 3, "steps": [
            *steps, {"tokenize": {"train": {"vocabulary_size": 400, "sample_bytes": 20_000}}},
            {"pack": {"sequence_length": 64, "validation_fraction": 0.1}}]})


def write(folder, files: int, seed: int):
    folder.mkdir()
    lines = [json.dumps(record) + "\n" for record in records()]
    random.Random(seed).shuffle(lines)
    for number in range(files):
        (folder / f"{seed}-{number}.jsonl").write_text("".join(lines[number::files]))
    return str(folder)


STEPS = ({"filter": {"refinedweb": {}}}, {"filter": {"fineweb": {}, "gopher_quality": {}, "annotate": True}},
         "dedup_exact", {"filter": {"pii": {}}}, {"filter": {"gopher_quality": {"min_words": 1}, "annotate": True}},
         "dedup_near")


@pytest.fixture(scope="module")
def finished(cluster, tmp_path_factory):
    root = tmp_path_factory.mktemp("filters")
    return root / "out", pipeline.run(config(*STEPS), input=write(root / "in", 3, 0), output=str(root / "out"))


def test_edited_documents_are_packed(finished):
    output, summary = finished
    texts = {record["id"]: record["text"] for record in records()}
    shouting = {f"d{number:02d}" for number in range(0, 60, 7)}
    copies = {f"menu-{number}" for number in (1, 2, 3)}
    expected = {}
    for identity in set(texts) - shouting - copies:
        lines = [line for line in texts[identity].split("\n") if line != "12 likes"]
        expected[identity] = "\n".join(lines)
    result = documents_of(output)
    assert {name: text.replace("email@example.com", MAIL).replace("firstname.lastname@example.org", MAIL)
            for name, text in result.items()} == expected
    assert not any(MAIL in text for text in result.values())

    first = summary.stage("filter")
    assert first["dropped"] == {"refinedweb_too_many_words_removed": len(shouting)}
    edited = {identity for identity in expected if "12 likes" in texts[identity]}
    assert first["edits"] == {"refinedweb_lines": len(edited) + len(copies)}
    assert first["edited"] == len(edited) + len(copies)
    assert summary.stage("dedup_exact")["dropped"] == {"exact_duplicate": 3}, "hashes are those of the edited texts"
    later = summary.stage("filter_2")
    assert later["edits"] == {"pii_replaced": sum(MAIL in text for text in expected.values())}
    sample = summary.value["samples"]["filter_2"]["pii_replaced"][0]
    assert MAIL in sample["text"]
    assert "example" in sample["after"]
    assert json.loads(sample["detail"])["pii_emails"] == 1


def test_each_edit_can_be_traced(finished):
    output, _ = finished
    result = lineage(store(str(output)), "d20", packed=True)
    changed = [row for row in result["verdicts"] if row["verdict"] != "kept"]
    assert [(row["stage"], row["verdict"], row["reason"]) for row in changed] == [
        ("filter", "edit", "refinedweb_lines"), ("filter_2", "edit", "pii_replaced")]
    assert result["verdicts"][0]["detail"]["refinedweb_removed_lines"] == 1


def test_annotations_have_statistics_and_reasons(finished):
    output, summary = finished
    tables = {stage: pq.read_table(output / "annotations" / stage).sort_by("id") for stage in ("filter", "filter_3")}
    assert summary.stage("filter_3")["dropped"] == {}
    assert len(tables["filter"]) == summary.stage("filter")["documents_out"]
    assert len(tables["filter_3"]) == summary.stage("filter_3")["documents_in"]
    assert summary.stage("filter")["would_drop"] == {
        reason: count for reason, count in Counter(tables["filter"]["would_drop"].to_pylist()).items() if reason}
    limits = {name: limit for rule in FilterStep.model_validate(STEPS[1]["filter"]).filters
              for name, limit in rule.limits().items()}
    assert set(limits) == set(tables["filter"].column_names) - {"id", "source", "would_drop"}
    fails = np.zeros(len(tables["filter"]), bool)
    for name, (low, high) in limits.items():
        values = tables["filter"][name].to_numpy()
        fails |= (values < np.float32(-np.inf if low is None else low)) | (
            values > np.float32(np.inf if high is None else high))
    assert (fails == (np.array(tables["filter"]["would_drop"].to_pylist(), object) != "")).all()
    assert {"words", "hash_ratio"} <= set(summary.value["histograms"])


def test_file_order_does_not_matter_and_old_annotations_are_removed(finished, tmp_path):
    output, _ = finished
    other = str(tmp_path / "out")
    source = write(tmp_path / "in", 1, 8)
    pipeline.run(config(*STEPS), input=source, output=other)
    hashes = shard_hashes(str(output))
    assert {name: hashes[name] for name in hashes} == shard_hashes(other)
    again = pipeline.run(config(*STEPS), input=source, output=other)
    assert all(stage["units"] == stage["units_reused"] for stage in again.value["stages"])
    pipeline.run(config("dedup_exact"), input=source, output=other, may_replace=True)
    assert not list((tmp_path / "out" / "annotations").rglob("*.parquet"))
