"""The first bytes of a file decide its format, whatever its name."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.data.readers.test_lines import PACK
from tidewheel.config import build
from tidewheel.console import print_table
from tidewheel.data import pipeline_plan
from tidewheel.data.config import PipelineConfig, ReadConfig
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers import Shape, UnreadableFile, read_records, shape_of
from tidewheel.data.stages import ingest
from tidewheel.data.stages.resolve import resolve
from tidewheel.errors import InputError
from tidewheel.storage import store

ROWS = [{"id": "1", "text": "a b"}, {"id": "2", "text": "caf\u00e9 \U0001f600"}]
JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
CSV = "id,text\n1,a b\n2,caf\u00e9 \U0001f600\n"


def parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), sink)
    return sink.getvalue()


def arrow(new=pa.ipc.new_stream) -> bytes:
    sink, table = io.BytesIO(), pa.Table.from_pylist(ROWS)
    with new(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def look(folder, name, data, **settings) -> Shape:
    store(folder).write(name, data)
    return shape_of(store(folder), name, ReadConfig(paths=("*",), **settings))


READABLE = {
    "JSONL": (JSONL.encode(), "jsonl"),
    "a JSON array": (json.dumps(ROWS).encode(), "json"),
    "a JSON array over lines": (json.dumps(ROWS, indent=2).encode(), "json"),
    "an array with a record a line": (b"[" + b",\n".join(json.dumps(row).encode() for row in ROWS) + b"]", "json"),
    "objects over lines": ("\n".join(json.dumps(row, indent=2) for row in ROWS).encode(), "json"),
    "CSV": (CSV.encode(), "csv"),
    "CSV with a byte order mark": (b"\xef\xbb\xbf" + CSV.encode(), "csv"),
    "CSV with semicolons": (CSV.replace(",", ";").encode(), "csv"),
    "TSV": (CSV.replace(",", "\t").encode(), "tsv"),
    "Parquet": (parquet(), "parquet"),
    "an Arrow stream": (arrow(), "arrow"),
    "an Arrow file": (arrow(pa.ipc.new_file), "arrow"),
}


@pytest.mark.parametrize("name", ["data", "data.json", "data.jsonl", "data.parquet", "data.csv"])
@pytest.mark.parametrize("content", READABLE)
def test_content_decides_whatever_the_name_says(tmp_path, content, name):
    data, kind = READABLE[content]
    expected = "csv" if kind == "tsv" and name.endswith(".csv") else kind
    shape = look(tmp_path, name, data)
    if kind in ("csv", "tsv") and name.endswith("parquet"):
        assert shape == Shape("parquet"), "a damaged Parquet file is not taken for a table"
        return
    assert (shape.format, shape.problem) == (expected, "")
    results = list(read_records(store(tmp_path), name, ReadConfig(paths=("*",))))
    assert [(item.id, item.text) for item in results] == [(row["id"], row["text"]) for row in ROWS]


@pytest.mark.parametrize("packing", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["data.json", "data.jsonl.gz", "data.jsonl.zst"])
@pytest.mark.parametrize("content", ["JSONL", "a JSON array over lines", "CSV"])
def test_content_decides_the_compression(tmp_path, content, name, packing):
    data, kind = READABLE[content]
    assert look(tmp_path, name, PACK[packing](data)) == Shape(
        kind, {".gz": "gzip", ".zst": "zstd"}[packing], delimiter="," if kind == "csv" else "")
    assert [item.id for item in read_records(store(tmp_path), name, ReadConfig(paths=("*",)))] == ["1", "2"]


def test_a_plain_file_with_a_compressed_name_is_read(tmp_path):
    assert look(tmp_path, "data.jsonl.gz", JSONL.encode()) == Shape("jsonl")
    assert len(list(read_records(store(tmp_path), "data.jsonl.gz", ReadConfig(paths=("*",))))) == 2


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize(("name", "text"), [("a.jsonl", JSONL), ("a.csv", CSV), ("a.json", json.dumps(ROWS, indent=1)),
                                            ("a.txt", CSV)])
def test_utf_16_is_read(tmp_path, name, text, encoding, packing):
    shape = look(tmp_path, name, PACK[packing](text.encode(encoding)))
    assert shape.encoding in ("utf-16-le", "utf-16-be")
    assert not shape.is_seekable
    results = list(read_records(store(tmp_path), name, ReadConfig(paths=("*",))))
    assert [item.text for item in results] == ([CSV] if name == "a.txt" else [row["text"] for row in ROWS])


def test_a_bad_character_in_utf_16_affects_only_its_record(tmp_path):
    data = JSONL.encode("utf-16-le").replace("\U0001f600".encode("utf-16-le"), b"\x00\xd8") + JSONL.encode("utf-16-le")
    assert look(tmp_path, "a.jsonl", b"\xff\xfe" + data + b"\0").encoding == "utf-16-le"
    results = list(read_records(store(tmp_path), "a.jsonl", ReadConfig(paths=("*",))))
    assert [item.reason if isinstance(item, Bad) else item.id for item in results] == [
        "1", "wrong_encoding", "1", "2", "wrong_encoding"]


def zipped() -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("a.jsonl", JSONL)
    return sink.getvalue()


def tarred() -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.jsonl"), io.BytesIO())
    return sink.getvalue()


UNREADABLE = [  # the ids are written out: archives hold the time, so two test processes would find different names
    pytest.param(b"\x89PNG\r\n\x1a\n" + bytes(99), "a PNG image", id="png"),
    pytest.param(b"\xff\xd8\xff\xe0" + bytes(99), "a JPEG image", id="jpeg"),
    pytest.param(b"%PDF-1.7\n", "a PDF document", id="pdf"),
    pytest.param(zipped(), "a ZIP archive", id="zip"),
    pytest.param(tarred(), "a tar archive", id="tar"),
    pytest.param(gzip.compress(tarred()), "a tar archive", id="tar.gz"),
    pytest.param(b"BZh91AY", "compressed with bzip2", id="bzip2"),
    pytest.param(JSONL.encode("utf-32"), "text in UTF-32", id="utf-32"),
    pytest.param(b"\x80\x04\x95" + bytes(9), "a Python pickle", id="pickle"),
]


@pytest.mark.parametrize("name", ["a.json", "a.txt", "a.parquet", "a.csv"])
@pytest.mark.parametrize(("data", "problem"), UNREADABLE)
def test_unsupported_files_are_recognised(tmp_path, name, data, problem):
    shape = look(tmp_path, name, data)
    assert shape.problem.startswith(problem)
    assert shape.hint
    with pytest.raises(UnreadableFile, match=problem):
        list(read_records(store(tmp_path), name, ReadConfig(paths=("*",))))


@pytest.mark.parametrize(("name", "data", "problem"), [
    ("a.json", b"<!DOCTYPE html>\n<html><body>text</body></html>", "an HTML page"),
    ("a.csv", b"id,body\n1,a b\n", "CSV without a column 'text'; there are 'id', 'body'"),
    ("a", b"id,body\n1,a b\n2,c d\n3,e f\n", "CSV without a column 'text'"),
    ("a.tsv", b"id\tbody\n1\ta b\n", "TSV without a column 'text'"),
    ("a.parquet.gz", gzip.compress(parquet()), "a columnar file packed with gzip")])
def test_files_without_documents_have_a_problem(tmp_path, name, data, problem):
    assert look(tmp_path, name, data).problem.startswith(problem)


@pytest.mark.parametrize(("format", "content", "problem"), [
    ("jsonl", "a JSON array", "JSON, an array"), ("jsonl", "Parquet", "a Parquet file"),
    ("csv", "JSONL", "CSV without a column"),
    ("parquet", "a JSON array", "JSON, an array"), ("text", "Parquet", "a Parquet file"), ("text", "JSONL", ""),
    ("csv", "TSV", "")])
def test_a_format_setting_that_contradicts_the_content_is_a_problem(tmp_path, format, content, problem):
    shape = look(tmp_path, "a", READABLE[content][0], format=format)
    assert shape.format == format
    assert shape.problem.startswith(problem)
    assert bool(shape.problem) == bool(problem)
    assert (shape.delimiter != "") == (format == "csv")


@pytest.mark.parametrize(("data", "kind"), [
    (b"", "jsonl"), (b"\n\n", "jsonl"), (b"[1, 2]\n[3, 4]\n", "jsonl"), (b'{"text": "a"', "jsonl"),
    (b"{no json}\n" + JSONL.encode(), "jsonl"), (b"x, y\n" + JSONL.encode(), "jsonl"),
    (b"no json at all\n" * 9, "jsonl"),
    (b"[]", "json"), (b"[\n", "json"), (b'{"text": "' + b"x" * 100_000 + b'"}\n', "jsonl")])
def test_unrecognised_content_is_jsonl(tmp_path, data, kind):
    assert look(tmp_path, "a", data) == Shape(kind)


@pytest.mark.parametrize("text", [
    '{"a": 1}\n', "id,text\n1,a\n", "WARC/1.0 was a format", "<html> is a tag"])
def test_text_stays_text(tmp_path, text):
    assert look(tmp_path, "a.txt", text.encode()) == Shape("text")
    found, = read_records(store(tmp_path), "a.txt", ReadConfig(paths=("*",)))
    assert found.text == text


def job(folder, **settings):
    steps = [{"tokenize": {"train": {}}}, "pack"]
    config = build(PipelineConfig, {"read": {"paths": ["*"]}, "steps": steps, **settings})
    return resolve(config, input=str(folder / "in"), output=str(folder / "out"))


def test_too_many_files_that_cannot_be_read_end_the_run_before_it_starts(tmp_path):
    look(tmp_path / "in", "a.json", b"\x89PNG\r\n\x1a\n")
    look(tmp_path / "in", "b.json", b"%PDF-1.7")
    look(tmp_path / "in", "c.json", JSONL.encode())
    message = r"a.json: this is a PNG image; 1 more: a PDF document \(2 of 3 files"
    with pytest.raises(InputError, match=message) as error:
        job(tmp_path)
    assert "read.paths" in error.value.fix


def test_a_plan_shows_files_by_format_and_a_record_of_each(tmp_path, capsys):
    files = {"a.json": json.dumps(ROWS).encode() * 9, "b.json": json.dumps(ROWS).encode(), "c.csv": CSV.encode(),
             "d.jsonl": b'{"txt": "[/red] a"}\n', "e.jsonl.gz": gzip.compress(b'{"text": "[bold]\\u001b[2J[/x] b"}\n'),
             "f.bin": b"\x89PNG\r\n\x1a\n"}
    for name, data in files.items():
        look(tmp_path / "in", name, data)
    recipe = {"read": {"paths": ["*"]}, "max_bad_fraction": 0.5, "steps": [{"tokenize": {"train": {}}}, "pack"]}
    plan = pipeline_plan.plan(build(PipelineConfig, recipe), input=str(tmp_path / "in"), output=str(tmp_path / "out"))
    by_format = {line.format: (line.files, line.is_usable, line.record) for line in plan.formats}
    assert by_format == {
        "json": (2, True, "'1': a b"), "csv": (1, True, "'1': a b"),
        "jsonl": (1, False, "cannot be used: the record has no text field (no field 'text'; there are: 'txt')"),
        "jsonl, gzip": (1, True, by_format["jsonl, gzip"][2]),
        "a PNG image": (1, False, "cannot be read: leave it out of read.paths")}
    assert by_format["jsonl, gzip"][2].endswith(": [bold]\ufffd[2J[/x] b"), "nothing of it moves the cursor"
    print_table([line.row() for line in plan.formats])
    assert "[bold]" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_few_files_that_cannot_be_read_go_to_quarantine(tmp_path):
    look(tmp_path / "in", "a.json", b"\x89PNG\r\n\x1a\n")
    look(tmp_path / "in", "b.json", json.dumps(ROWS).encode())
    done = [ingest.ingest_file(task) for task in ingest.tasks(job(tmp_path, max_bad_fraction=0.5))]
    assert [unit.summary["quarantined"] for unit in done] == [{"unreadable_file": 1}, {}]
    assert [unit.summary["documents"] for unit in done] == [0, 2]
    line = json.loads(store(tmp_path / "out").read(done[0].files["quarantine"].key))
    assert line["detail"].startswith("a PNG image")
