"""Reading as units, without a cluster: ranges of files give what whole files give, and the worst file is named."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidewheel.config import build
from tidewheel.data import pipeline
from tidewheel.data.config import PipelineConfig
from tidewheel.data.stage import counts, read_table
from tidewheel.data.stages import ingest
from tidewheel.data.stages.job import resolve
from tidewheel.errors import InputError
from tidewheel.storage import store


def recipe(**read) -> PipelineConfig:
    return build(PipelineConfig, {"read": {"paths": ["**/*"], **read}, "max_bad_fraction": 0,
                                  "steps": [{"tokenize": {"train": {}}}, "pack"]})


@pytest.fixture
def folder(tmp_path):
    """Good and bad records, files that are empty in two ways, and one cut off."""
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
    """(documents, quarantine) of units, sorted, less the numbers of lines, which ranges do not know."""
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
def test_ranges_give_what_whole_files_give(folder, tmp_path, size):
    whole = units(folder, tmp_path / "whole")
    ranged = units(folder, tmp_path / "ranged", unit_bytes=size)
    assert len(ranged) > len(whole)
    assert read_back(tmp_path / "ranged", ranged) == read_back(tmp_path / "whole", whole)
    for name in ("records", "bad", "documents", "bytes"):
        assert sum(unit.summary[name] for unit in ranged) == sum(unit.summary[name] for unit in whole)
    found = counts(ranged, "quarantined")
    assert found == {"empty_file": 2, "empty_text": 1, "invalid_json": 2, "missing_text": 1, "truncated_file": 1,
                     "wrong_encoding": 1}


def test_units_are_told_apart_by_what_they_read(folder, tmp_path):
    def keys(**read):
        job = resolve(recipe(**read), input=str(folder), output=str(tmp_path / "out"))
        return {task.unit.label: task.unit.key for task in ingest.tasks(job)}

    whole, ranged = keys(), keys(unit_bytes=1000)
    assert whole == keys(unit_bytes=1 << 30), "where nothing is cut, the size of a range counts for nothing"
    assert len(set(ranged.values())) == len(ranged)
    assert ranged["c.txt"] == whole["c.txt"]
    assert {"a.jsonl[bytes 0-999]", "a.jsonl[bytes 1000-1999]", "b.parquet[row groups 0-0]"} <= set(ranged)
    assert set(keys(max_record_bytes=5000).values()).isdisjoint(whole.values())
    plan = pipeline.plan(recipe(unit_bytes=1000), input=str(folder), output=str(tmp_path / "out"))
    assert (plan.stages[0].units, plan.files) == (len(ranged), len(whole))


def test_the_worst_file_is_named_with_its_ranges_together(folder, tmp_path):
    (folder / "worse.jsonl").write_bytes(b"{\n" * 30 + json.dumps({"text": "good"}).encode() * 20)
    job = resolve(recipe(unit_bytes=100), input=str(folder), output=str(tmp_path / "out"))
    done = [ingest.ingest_file(task) for task in ingest.tasks(job)]
    with pytest.raises(InputError, match="31 of 31, in this file: invalid_json 31") as error:
        ingest.check_share(done, job)
    assert error.value.where == "worse.jsonl"
