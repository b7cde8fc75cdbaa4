"""Reading in units, without a cluster: ranges give the same as whole files, and errors name the worst file."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidewheel.config import build
from tidewheel.data import pipeline_plan
from tidewheel.data.config import PipelineConfig
from tidewheel.data.stage import counts, read_table
from tidewheel.data.stages import ingest
from tidewheel.data.stages.resolve import MIN_PARTITIONS, partition_count, resolve
from tidewheel.data.stages.sources import SourceFile
from tidewheel.errors import InputError
from tidewheel.storage import store


def recipe(**read) -> PipelineConfig:
    return build(PipelineConfig, {"read": {"paths": ["**/*"], **read}, "max_bad_fraction": 0,
                                  "steps": [{"tokenize": {"train": {}}}, "pack"]})


@pytest.fixture
def folder(tmp_path):
    """Write good and bad records, two kinds of empty files, and a truncated file."""
    root = tmp_path / "in"
    root.mkdir()
    lines = [json.dumps({"id": f"a{number}", "text": f"text {number} " * (number % 9 + 1)}).encode()
             for number in range(200)]
    lines[50], lines[51], lines[120], lines[199] = b"{no json", b'"caf\xe9"', b'{"txt": 1}', b"x" * 3000
    (root / "a.jsonl").write_bytes(b"\r\n".join(lines))
    (root / "blank.jsonl").write_bytes(b"\n \r\n" * 2000)
    (root / "none.jsonl").write_bytes(b"")
    (root / "cut.jsonl.gz").write_bytes(gzip.compress(b"".join(b'{"text": "%d"}\n' % number for number in
                                                                range(5000)))[:-9])
    pq.write_table(pa.table({"id": [f"b{number}" for number in range(300)], "text": ["a word"] * 299 + [""]}),
                   root / "b.parquet", row_group_size=100)
    (root / "c.txt").write_text("a text of its own")
    return root


def units(folder, output, **read):
    job = resolve(recipe(**read), input=str(folder), output=str(output))
    return [ingest.ingest_file(task) for task in ingest.tasks(job)]


def read_back(output, done):
    """Return (documents, quarantine) of units, sorted, without line numbers, which ranges do not have."""
    documents, bad = [], []
    for unit in done:
        for row in read_table(store(output), unit.files["documents"]).to_pylist():
            meta = {name: value for name, value in json.loads(row["meta"]).items() if name != "_line"}
            documents.append({**row, "line": 0, "meta": json.dumps(meta)})
        if "quarantine" in unit.files:
            bad += [{**json.loads(line), "line": 0}
                    for line in store(output).read(unit.files["quarantine"].key).splitlines()]
    return sorted(documents, key=repr), sorted(bad, key=repr)


@pytest.mark.parametrize("size", [100, 1000, 4999])
def test_ranges_give_the_same_documents_as_whole_files(folder, tmp_path, size):
    whole = units(folder, tmp_path / "whole")
    ranged = units(folder, tmp_path / "ranged", unit_bytes=size)
    assert len(ranged) > len(whole)
    assert read_back(tmp_path / "ranged", ranged) == read_back(tmp_path / "whole", whole)
    for name in ("records", "bad", "documents", "bytes"):
        assert sum(unit.summary[name] for unit in ranged) == sum(unit.summary[name] for unit in whole)
    result = counts(ranged, "quarantined")
    assert result == {"empty_file": 2, "empty_text": 1, "invalid_json": 2, "missing_text": 1, "truncated_file": 1,
                     "wrong_encoding": 1}


def test_keys_of_units_depend_on_what_they_read(folder, tmp_path):
    def keys(**read):
        job = resolve(recipe(**read), input=str(folder), output=str(tmp_path / "out"))
        return {task.unit.label: task.unit.key for task in ingest.tasks(job)}

    whole, ranged = keys(), keys(unit_bytes=1000)
    assert whole == keys(unit_bytes=1 << 30), "where nothing is cut, the size of a range counts for nothing"
    assert len(set(ranged.values())) == len(ranged)
    assert ranged["c.txt"] == whole["c.txt"]
    assert {"a.jsonl[bytes 0-999]", "a.jsonl[bytes 1000-1999]", "b.parquet[row groups 0-0]"} <= set(ranged)
    assert set(keys(max_record_bytes=5000).values()).isdisjoint(whole.values())
    plan = pipeline_plan.plan(recipe(unit_bytes=1000), input=str(folder), output=str(tmp_path / "out"))
    assert (plan.stages[0].units, plan.files) == (len(ranged), len(whole))


def test_the_worst_file_is_named_with_its_ranges_together(folder, tmp_path):
    (folder / "worse.jsonl").write_bytes(b"{\n" * 30 + json.dumps({"text": "good"}).encode() * 20)
    job = resolve(recipe(unit_bytes=100), input=str(folder), output=str(tmp_path / "out"))
    done = [ingest.ingest_file(task) for task in ingest.tasks(job)]
    with pytest.raises(InputError, match="31 of 31, in this file: invalid_json 31") as error:
        ingest.check_share(done, job)
    assert error.value.where == "worse.jsonl"


def ids(output, done):
    return [row["id"] for unit in done for row in read_table(store(output), unit.files["documents"]).to_pylist()]


@pytest.mark.parametrize("size", [1 << 28, 5000])
def test_a_sample_does_not_depend_on_the_files(folder, tmp_path, size):
    every = ids(tmp_path / "all", units(folder, tmp_path / "all"))
    tenth = units(folder, tmp_path / "tenth", sample=0.1, unit_bytes=size)
    third = units(folder, tmp_path / "third", sample=0.3)
    tenth_ids, more = set(ids(tmp_path / "tenth", tenth)), set(ids(tmp_path / "third", third))
    assert tenth_ids < more < set(every)
    assert 0.08 < len(tenth_ids) / len(set(every)) < 0.12
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    lines = [line for line in (folder / "a.jsonl").read_bytes().splitlines() if line.startswith(b'{"id"')]
    (elsewhere / "z.jsonl").write_bytes(b"\n".join(reversed(lines)))
    again = units(elsewhere, tmp_path / "again", sample=0.1)
    assert set(ids(tmp_path / "again", again)) == tenth_ids & {f"a{number}" for number in range(200)}
    assert [unit.summary["records"] for unit in again] == [len(ids(tmp_path / "again", again))]


def test_a_sample_keeps_the_share_of_bad_records(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(b"".join(
        b'{"text": "%d"}\n' % number if number % 4 else b"{no json\n" for number in range(4000)))
    unit, = units(tmp_path / "in", tmp_path / "out", sample=0.1)
    assert 70 < unit.summary["bad"] < 130
    assert 250 < unit.summary["documents"] < 350


def test_a_limit_reads_from_each_file_by_its_size(tmp_path):
    (tmp_path / "in").mkdir()
    for name, count in (("a.jsonl", 3000), ("b.jsonl", 1000), ("c.jsonl", 1)):
        lines = [b'{"id": "%s%d", "text": "%08d"}' % (name[:1].encode(), number, number) for number in range(count)]
        (tmp_path / "in" / name).write_bytes(b"\n".join([*lines[:20], b"{no json", *lines[20:]]))
    (tmp_path / "in/d.jsonl.gz").write_bytes(gzip.compress(b'{"id": "d", "text": "x"}\n' * 9)[:-9])
    result = units(tmp_path / "in", tmp_path / "out", limit=100, unit_bytes=1000)
    read = ids(tmp_path / "out", result)
    assert 98 <= len(read) <= 100
    first, second = ([name for name in read if name[0] == which] for which in "ab")
    assert first == [f"a{number}" for number in range(len(first))]
    assert second == [f"b{number}" for number in range(len(second))]
    assert 2.8 < len(first) / len(second) < 3.2
    assert sum(unit.summary["bad"] for unit in result) == 2, "of what is read, the line that is no JSON in each"
    assert [unit.summary["records"] for unit in units(tmp_path / "in", tmp_path / "one", limit=1)] == [1]


def test_a_limit_or_sample_changes_keys_and_partition_counts(folder, tmp_path):
    keys = {task.unit.key for read in ({}, {"limit": 50}, {"limit": 90}, {"sample": 0.5}) for task in ingest.tasks(
        resolve(recipe(**read), input=str(folder), output=str(tmp_path / "out"))) if task.unit.label == "a.jsonl"}
    assert len(keys) == 4
    assert recipe().recipe_hash() == build(PipelineConfig, recipe().canonical()).recipe_hash()
    files = [SourceFile("/", "a.jsonl", "a.jsonl", 1 << 45, "")]
    config = build(PipelineConfig, {**recipe(limit=200).canonical()})
    assert partition_count(config, files) == MIN_PARTITIONS
    assert partition_count(recipe(sample=0.001), files) <= partition_count(recipe(), files) / 512
