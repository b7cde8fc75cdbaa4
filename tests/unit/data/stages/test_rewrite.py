"""A rewritten partition equals one made by reading the edited documents."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa

from tidewheel.config import build
from tidewheel.data import verdicts
from tidewheel.data.config import PipelineConfig
from tidewheel.data.filter import Filter, Verdicts
from tidewheel.data.stage import Unit, read_table
from tidewheel.data.stages import filters, ingest, partition, row_local
from tidewheel.data.stages.drops import after, publish
from tidewheel.data.stages.execute import Task
from tidewheel.data.stages.partition import Part, load_documents, load_keys
from tidewheel.data.stages.resolve import resolve

WORDS = ["and", "so", "it", "went", "on", "until", "the", "tide", "turned", "they", "all", "sailed", "home", "with"]


class Cut(Filter):
    """Filter that cuts the word "tide" and drops documents with "storm"."""

    EDITS = "cut_out"

    def apply(self, batch):
        values = batch.texts.to_pylist()
        return Verdicts(["cut_storm" if "storm" in text else "" for text in values],
                        texts=[text.replace("tide", "") for text in values])


class Rank(Filter):
    """Filter that ranks documents by their position."""

    WRITES = True

    def apply(self, batch):
        return Verdicts([""] * len(batch), quality=np.arange(len(batch), dtype=np.float32))


def texts():
    generator = np.random.default_rng(0)
    made = [" ".join(generator.choice(WORDS, 30)) + (" storm" if number % 5 == 0 else "") for number in range(40)]
    return [*made, "tide"]


def part_of(folder, records) -> tuple[Task, Part]:
    """Return the single partition of a folder's documents after ingest and partition."""
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = build(PipelineConfig, {"read": {"paths": ["*.jsonl"]}, "partitions": 1, "steps": [
        "dedup_near", {"tokenize": {"train": {}}}, "pack"]})
    job = resolve(config, input=str(folder / "in"), output=str(folder / "out"))
    (read,) = ingest.tasks(job)
    unit = ingest.ingest_file(read)
    task = Task(job.output, Unit("partition", "part-00000", "1" * 32))
    rows = pa.concat_tables(list(partition.read_ingested(Task(job.output, unit.unit, {
        "documents": unit.files["documents"], "partitions": 1, "wanted": [0]}))))
    done = partition.publish(task, rows.drop_columns("partition"))
    part = Part(0, done.files["documents"], done.files["keys"], (), done.summary["documents"])
    return Task(job.output, Unit("filter_2", "part-00000", "2" * 32), {
        **part.inputs(), "minhash": read.inputs["minhash"], "filters": [], "rewrite": True}), part


def filtered(task: Task, *parts: Filter):
    inputs = {**task.inputs, "filters": [[False, [filters.bound(part) for part in parts]]]}
    return row_local.filter_part(Task(task.output, task.unit, inputs))


def test_a_rewritten_partition_equals_one_made_from_the_edited_texts(tmp_path):
    records = [{"id": f"d{number:02d}", "text": text} for number, text in enumerate(texts())]
    task, part = part_of(tmp_path / "one", records)
    # dropped by an earlier stage: neither judged nor written again
    gone = publish(Task(task.output, Unit("earlier", "part-00000", "3" * 32), part.inputs()),
                   verdicts.drops(pa.array(["d01"]), "earlier"), pa.table({"id": ["d01"], "head": [""]}))
    (part,) = after([part], [gone])
    done = filtered(Task(task.output, task.unit, {**task.inputs, **part.inputs()}), Cut())
    (left,) = after([part], [done])

    kept = [{**record, "text": record["text"].replace("tide", "")} for record in records
            if "storm" not in record["text"] and record["text"] != "tide" and record["id"] != "d01"]
    assert done.summary["dropped"] == {"cut_storm": 8, f"{__name__}:Cut_nothing_left": 1}
    edited = sum("tide" in record["text"] for record in records) - 1
    assert 0 < done.summary["edited"] <= edited
    assert done.summary["edits"] == {"cut_out": done.summary["edited"]}
    expected, other = part_of(tmp_path / "two", kept)
    assert left.dropped == ()
    assert left.count == other.count == len(kept)
    rewritten = pa.concat_tables(list(load_documents(task.store, left.inputs())))
    theirs = pa.concat_tables(list(load_documents(expected.store, other.inputs())))
    assert rewritten.select(["id", "text", "source"]).equals(theirs.select(["id", "text", "source"]))
    assert load_keys(task.store, left.inputs()).equals(load_keys(expected.store, other.inputs()))
    assert filtered(task, Cut()).files.keys() == {"documents", "keys", "verdicts"}


def test_quality_reaches_the_keys(tmp_path):
    task, part = part_of(tmp_path, [{"id": f"d{number:02d}", "text": text} for number, text in enumerate(texts())])
    (left,) = after([part], [filtered(task, Rank(), Cut())])
    before, now = load_keys(task.store, part.inputs()), load_keys(task.store, left.inputs())
    assert set(before["quality"].to_pylist()) == {0.0}
    row = {identity: place for place, identity in enumerate(before["id"].to_pylist())}
    assert now["quality"].to_pylist() == [row[identity] for identity in now["id"].to_pylist()]


def test_the_same_unit_twice_gives_the_same_bytes(tmp_path):
    task, _ = part_of(tmp_path, [{"id": f"d{number:02d}", "text": text} for number, text in enumerate(texts())])
    assert filtered(task, Cut(), Rank()).files == filtered(task, Cut(), Rank()).files


def test_a_partition_can_become_empty(tmp_path):
    task, part = part_of(tmp_path, [{"id": "a", "text": "storm"}, {"id": "b", "text": "storm tide"}])
    done = filtered(task, Cut())
    (left,) = after([part], [done])
    assert left.count == 0
    assert list(load_documents(task.store, left.inputs())) == []
    assert load_keys(task.store, left.inputs()).schema == read_table(task.store, part.keys).schema


def test_a_document_can_be_edited_and_then_dropped(tmp_path):
    task, part = part_of(tmp_path, [{"id": "a", "text": "a tide of words"}, {"id": "b", "text": "plain words"}])
    unit = Unit("cut", "part-00000", "4" * 32)
    rows = verdicts.merge([verdicts.rows(verdicts.EDIT, pa.array(["a", "b"]), "cut_out", details=["{}", "{}"]),
                           verdicts.rows(verdicts.KEEP, pa.array(["b"]), "seen"),
                           verdicts.rows(verdicts.DROP, pa.array(["a"]), "too_short")])
    done = publish(Task(task.output, unit, part.inputs()), rows, pa.table({"id": ["a", "b"], "head": ["x", "y"]}))
    assert done.summary["dropped"] == {"too_short": 1}
    assert done.summary["edits"] == {"cut_out": 2}
    assert (done.summary["documents"], done.summary["edited"]) == (1, 1)
    (left,) = after([part], [done])
    assert pa.concat_tables(list(load_documents(task.store, left.inputs())))["id"].to_pylist() == ["b"]
    written = verdicts.decode(task.store.read(done.files["verdicts"].key))
    assert written.select(["id", "verdict"]).to_pylist() == [
        {"id": "a", "verdict": "edit"}, {"id": "a", "verdict": "drop"},
        {"id": "b", "verdict": "edit"}, {"id": "b", "verdict": "keep"}]
