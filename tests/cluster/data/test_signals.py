"""URL, language, word and classifier filters, and deduplication by URL and by line, through whole pipelines on Ray."""

from __future__ import annotations

import json
import random
import shutil

import pyarrow.parquet as pq
import pytest

from tidewheel.config import build
from tidewheel.data import pipeline
from tidewheel.data.config import PipelineConfig
from tidewheel.data.stage import read_table
from tidewheel.errors import ConfigError, InputError
from tidewheel.shards.verify import verify
from tidewheel.storage import Stamp, store

pytestmark = pytest.mark.cluster

WORDS = ["harbour", "winter", "committee", "opened", "because", "the", "storm", "before", "again", "of", "painted"]
NOTICE = "We use cookies to make this site better for everybody who visits it."


def sentence(generator):
    return " ".join(generator.choice(WORDS) for _ in range(12)).capitalize() + "."


def corpus():
    """Return (records, expected verdict of each id that is dropped or edited)."""
    generator = random.Random(11)
    records = [{"id": f"plain-{number:02d}", "url": f"https://site{number}.example/page",
                "text": "\n\n".join(sentence(generator) for _ in range(4))} for number in range(30)]
    fate = {}

    def add(identity, text, becomes, **more):
        records.append({"id": identity, "text": text, **more})
        if becomes:
            fate[identity] = becomes

    records[0]["text"] += "\n\n" + NOTICE + "\n\n" + sentence(generator)
    add("notice", NOTICE.upper() + "\n\n" + sentence(generator), ("edit", "repeated_lines", "plain-00"))
    add("notice-only", NOTICE, ("drop", "dedup_lines_nothing_left", "plain-00"))
    add("same-page", "Short text.", ("drop", "url_duplicate", "plain-01"), url="http://www.site1.example/page/?utm_source=x")
    add("no-url", sentence(generator), None)
    add("bad-site", sentence(generator), ("drop", "url_domain", None), url="http://a.bad.example/x")
    add("bad-word", "An unspeakable " + sentence(generator), ("drop", "listed_words", None))
    add("german", "Der Ausschuss beschloss, dass der Hafen wieder geöffnet werden soll.", ("drop", "language", None))
    return records, fate


def write(folder, files=3, seed=0):
    records = corpus()[0]
    random.Random(seed).shuffle(records)
    folder.mkdir()
    for number in range(files):
        lines = [json.dumps(record) + "\n" for record in records[number::files]]
        (folder / f"{seed}-{number}.jsonl").write_text("".join(lines))
    (folder / "domains.list").write_text("bad.example\n")
    (folder / "words.list").write_text("unspeakable\n")
    return folder


def recipe(*overrides, more=()):
    return build(PipelineConfig, {"name": "signals", "partitions": 3, "read": {"paths": ["*.jsonl"]}, "steps": [
        {"filter": {"urls": {"domain_files": ["domains.list"]}, "language": {"min_score": 0.2},
                    "words": {"files": ["words.list"]}}},
        "dedup_url", *more, {"dedup_lines": {"unit": "paragraph", "min_characters": 30}},
        {"tokenize": {"train": {"vocabulary_size": 300}}},
        {"pack": {"sequence_length": 64, "validation_fraction": 0.2, "rows_per_shard": 16}}]}, overrides)


def shard_hashes(output):
    folder_store = store(output)
    return [f"{entry.key} {folder_store.hash(entry.key)}" for name in ("shards", "validation")
            for entry in folder_store.list(name)]


@pytest.fixture(scope="module")
def finished(cluster, tmp_path_factory):
    root = tmp_path_factory.mktemp("signals")
    return root, pipeline.run(recipe(), input=str(write(root / "in")), output=str(root / "out"))


def test_each_document_gets_the_expected_verdict(finished):
    root, summary = finished
    tables = [pq.read_table(path) for path in (root / "out" / "verdicts").rglob("*.parquet")]
    rows = {row["id"]: (row["verdict"], row["reason"], row["survivor"])
            for table in tables for row in table.to_pylist()}
    assert rows == corpus()[1]
    assert summary.stage("dedup_url")["dropped"] == {"url_duplicate": 1}
    assert summary.stage("dedup_lines")["dropped"] == {"dedup_lines_nothing_left": 1}
    assert summary.stage("dedup_lines")["edited"] == 1
    (sample,) = summary.value["samples"]["dedup_lines"]["repeated_lines"]
    assert sample["text"].startswith("WE USE COOKIES")
    assert NOTICE.upper() not in sample["after"]
    assert {"url_missing", "language_score", "listed_words"} <= set(summary.value["histograms"])
    assert verify(str(root / "out" / "shards")) == []


def test_rewritten_partitions_have_the_remaining_documents(finished):
    root, _ = finished
    place, found = store(str(root / "out")), {}
    for path in sorted((root / "out" / "stages" / "dedup_lines" / "units").glob("*.json")):
        files = json.loads(path.read_text())["files"]
        if "documents" in files:
            documents = read_table(place, Stamp(*files["documents"]))
            keys = read_table(place, Stamp(*files["keys"]))
            assert documents["id"].equals(keys["id"])
            assert keys["length"].to_pylist() == [len(text.encode()) for text in documents["text"].to_pylist()]
            found |= {row["id"]: row for row in documents.to_pylist()}
    assert NOTICE.upper() not in found["notice"]["text"]
    assert json.loads(found["notice"]["meta"])["language"] == "en"


def test_file_order_does_not_matter_and_a_second_run_does_nothing(finished, tmp_path):
    root, _ = finished
    pipeline.run(recipe(), input=str(write(tmp_path / "in", files=5, seed=4)), output=str(tmp_path / "out"))
    assert shard_hashes(tmp_path / "out") == shard_hashes(root / "out")
    again = pipeline.run(recipe(), input=str(tmp_path / "in"), output=str(tmp_path / "out"))
    assert all(stage["units_reused"] == stage["units"] for stage in again.value["stages"])


def test_a_changed_list_changes_the_result(finished, tmp_path):
    root, _ = finished
    shutil.copytree(root, tmp_path / "all")
    folder = tmp_path / "all"
    (folder / "in" / "words.list").write_text("nothing\n")
    ended = pipeline.run(recipe(), input=str(folder / "in"), output=str(folder / "out"))
    assert "listed_words" not in ended.stage("filter")["dropped"]
    assert ended.stage("ingest")["units_reused"] == 0
    (folder / "in" / "words.list").write_text("unspeakable\n")
    back = pipeline.run(recipe(), input=str(folder / "in"), output=str(folder / "out"))
    assert back.stage("dedup_lines")["units_reused"] == 3
    manifests = [(item / "out" / "shards" / "manifest.json").read_bytes() for item in (folder, root)]
    assert manifests[0] == manifests[1]


def test_the_classifier_decides_which_copy_stays(finished, tmp_path):
    pytest.importorskip("floret")
    from tidewheel.data.fasttext.training import TrainClassifier, train

    generator = random.Random(2)
    good = [sentence(generator) for _ in range(60)]
    poor = [" ".join(generator.choice(["buy", "click", "now", "the"]) for _ in range(12)) for _ in range(60)]
    model = train(good, poor, TrainClassifier(dimension=4, buckets=500, held_out=0.3, min_count=1)).model
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "model.bin").write_bytes(model)
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (
        {"id": "1", "url": "http://a.example/", "text": poor[0] + " " + poor[1]},
        {"id": "2", "url": "http://a.example", "text": good[0]}, {"id": "3", "text": good[1]})))
    config = build(PipelineConfig, {"read": {"paths": ["*.jsonl"]}, "steps": [
        {"filter": {"classifier": {"file": "model.bin", "min_score": 0, "as_quality": True}}}, "dedup_url",
        {"tokenize": {"train": {"vocabulary_size": 300}}}, {"pack": {"sequence_length": 16}}]})
    pipeline.run(config, input=str(folder), output=str(tmp_path / "out"))
    tables = [pq.read_table(path) for path in (tmp_path / "out" / "verdicts").rglob("*.parquet")]
    assert [(row["id"], row["survivor"]) for table in tables for row in table.to_pylist()] == [("1", "2")]

    (folder / "model.bin").write_bytes(model[:-5])
    with pytest.raises(ConfigError, match="it is truncated"):
        pipeline.check(config, input=str(folder), output=str(tmp_path / "out"))
    (folder / "model.bin").unlink()
    with pytest.raises(InputError, match="no such file"):
        pipeline.check(config, input=str(folder), output=str(tmp_path / "out"))
