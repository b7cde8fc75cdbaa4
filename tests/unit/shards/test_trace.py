"""Lineage: from a token to its document, file and verdicts, and from a document to its rows."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.shards.helpers import write_set
from tidewheel import storage
from tidewheel.cli import run_command
from tidewheel.errors import ShardError
from tidewheel.shards.trace import document_lines, token_lines, trace_document, trace_token


def write_verdicts(place, stage, *rows):
    place.write_json(f"verdicts/{stage}/summary.json", {})
    if rows:
        names = ("id", "verdict", "reason", "score", "survivor", "detail")
        types = (pa.string(), pa.string(), pa.string(), pa.float64(), pa.string(), pa.string())
        columns = zip(*rows)
        table = pa.table({name: pa.array(list(values), kind) for name, kind, values in zip(names, types, columns)})
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        place.write(f"verdicts/{stage}/x.parquet", memoryview(sink.getvalue()))


def write_documents(place, unit, *documents):
    values = [{"id": name, "text": "t", "source": "web",
               "meta": json.dumps({"_file": "a.jsonl", "_offset": 100 * line, **({"_line": line} if line > 2 else {})})}
              for line, name in enumerate(sorted(documents), 1)]
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(values)
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    place.write(f"stages/partition/units/{unit}/documents", memoryview(sink.getvalue()))


@pytest.fixture
def output(tmp_path):
    """Shards of 15 rows, a validation set of others, and a pipeline's verdicts; d1-3 was edited and stands for twin."""
    folder_store = storage.store(tmp_path)
    write_set(tmp_path / "shards")
    stages = ("ingest", "filter", "partition", "dedup_near", "redact", "pack")
    folder_store.write_json("summary.json", {"stages": [{"name": name} for name in stages]})
    write_documents(folder_store, "u1", "d0-0", "d1-0", "d1-3", "d2-7")
    write_documents(folder_store, "u2", "twin")
    write_verdicts(folder_store, "partition")
    write_verdicts(folder_store, "filter", ("short", "drop", "too_few_words", None, None, ""))
    write_verdicts(folder_store, "dedup_near", ("twin", "drop", "near_duplicate", 0.875, "d1-3", '{"note": 1}'))
    write_verdicts(folder_store, "redact", ("d1-3", "edit", "email", 2.0, None, ""))
    folder_store.write_json("stages/ingest/units/k.json", {
        "label": "b.jsonl[bytes 0-99]", "files": {"verdicts": ["verdicts/filter/x.parquet", 1, ""]},
        "summary": {"name": "b.jsonl"}})
    return tmp_path


def test_a_document_of_a_range_is_at_its_byte(output):
    lines = document_lines(trace_document(str(output / "shards"), "d0-0"))
    assert "source web, file a.jsonl from byte 100" in lines


def test_token_to_source(output):
    traced = trace_token(str(output / "shards"), 1, 5)
    assert traced["segment"] == {"start": 3, "tokens": 8, "document": "d1-3", "document_offset": 30}
    assert traced["document_offset"] == 32
    assert traced["value"] == 3
    assert traced["id"].endswith(".arrow:1")
    known = traced["lineage"]
    assert known["origins"] == [{"source": "web", "file": "a.jsonl", "line": 3, "offset": 300}]
    assert [(item["stage"], item["verdict"]) for item in known["verdicts"]] == [
        ("filter", "kept"), ("partition", "kept"), ("dedup_near", "kept"), ("redact", "edit")]
    assert known["stands_for"] == [{"document": "twin", "stage": "dedup_near", "reason": "near_duplicate",
                                    "score": 0.875, "detail": {"note": 1}}]
    lines = token_lines(traced)
    assert "source web, file a.jsonl line 3" in lines
    assert "  twin (dedup_near: near_duplicate, score 0.875)" in lines


def test_row_in_a_later_shard(output):
    assert trace_token(str(output / "shards"), 5, 0)["segment"]["document"] == "d5-0"
    assert trace_token(str(output / "shards"), 14, 0)["segment"]["document"] == "d14-0"


def test_document_to_rows(output):
    result = trace_document(str(output / "shards"), "d2-7")
    assert [(piece["row"], piece["segment"], piece["start"], piece["tokens"], piece["document_offset"])
            for piece in result["pieces"]] == [(2, 2, 7, 3, 70)]
    late = trace_document(str(output / "shards"), "d13-3")["pieces"]
    assert [(piece["row"], piece["segment"]) for piece in late] == [(13, 1)]


def test_dropped_duplicate(output):
    result = trace_document(str(output / "shards"), "twin")
    assert not result["pieces"]
    assert result["lineage"]["origins"][0]["file"] == "a.jsonl"
    assert [(item["verdict"], item["survivor"]) for item in result["lineage"]["verdicts"]] == [
        ("kept", None), ("kept", None), ("drop", "d1-3"), ("not reached", None)]
    assert "  dedup_near: drop: near_duplicate, score 0.875, in favour of d1-3" in document_lines(result)


def test_document_dropped_by_a_leading_filter_has_its_file(output):
    known = trace_document(str(output / "shards"), "short")["lineage"]
    assert known["origins"] == [{"source": None, "file": "b.jsonl", "line": None, "offset": None}]
    assert known["verdicts"][0]["reason"] == "too_few_words"


def test_held_out_document(output):
    write_set(output / "validation", rows=(20,))
    result = trace_document(str(output / "shards"), "d17-0")
    assert not result["pieces"]
    assert result["other_sets"] == [str(output / "validation")]


def test_set_alone(tmp_path):
    write_set(tmp_path / "shards")
    traced = trace_token(str(tmp_path / "shards"), 0, 0)
    assert traced["lineage"] is None
    assert "no pipeline output" in token_lines(traced)[-1]


@pytest.mark.parametrize(("row", "token", "told"), [(15, 0, "no row 15"), (-1, 0, "no row -1"), (3, 9, "no token 9"),
                                                    (0, -1, "no token -1")])
def test_no_such_place(output, row, token, told):
    with pytest.raises(ShardError, match=told) as error:
        trace_token(str(output / "shards"), row, token)
    assert error.value.fix


def test_no_such_document(output):
    with pytest.raises(ShardError, match="no document 'nobody'") as error:
        trace_document(str(output / "shards"), "nobody")
    assert error.value.fix


def test_damaged_verdicts(output):
    (output / "verdicts/filter/x.parquet").write_bytes(b"no parquet")
    with pytest.raises(ShardError, match="cannot be read") as error:
        trace_token(str(output / "shards"), 0, 0)
    assert "x.parquet" in error.value.where


def test_command(output, capsys):
    uri = str(output / "shards")
    assert run_command(["shards", "trace", uri, "--row", "1", "--token", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["segment"]["document"] == "d1-3"
    assert run_command(["shards", "trace", uri, "--row", "1"]) == 2
    assert "--token" in capsys.readouterr().err
