"""CSV and TSV are read like Python's `csv` reads them, JSON arrays like `json`; dotted names reach nested fields."""

from __future__ import annotations

import csv
import io
import json
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.data.readers.test_lines import PACK
from tidewheel.data.config import ReadConfig
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers import Shape, json_values, read_records
from tidewheel.data.readers.csv_fields import MalformedError, split_line
from tidewheel.storage import store


def read(folder, name, data, shape=None, **fields):
    store(folder).write(name, data)
    return list(read_records(store(folder), name, ReadConfig(paths=("*",), **fields), shape=shape))


def told(found):
    return [item.reason if isinstance(item, Bad) else item.text for item in found]


FIELD = st.text(alphabet='a b",;\n\u00e9', max_size=12)


@given(rows=st.lists(st.lists(FIELD, min_size=3, max_size=3), max_size=8), delimiter=st.sampled_from(",;\t"),
       quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]), ended=st.booleans(),
       end=st.sampled_from(["\n", "\r\n"]))
@examples(80)
def test_output_of_the_csv_module_round_trips(tmp_path_factory, rows, delimiter, quoting, ended, end):
    sink = io.StringIO()
    writer = csv.writer(sink, delimiter=delimiter, quoting=quoting, lineterminator=end)
    writer.writerow(["id", "text", "note"])
    for number, row in enumerate(rows):
        writer.writerow([f"d{number}", f"x{row[0]}", row[1]])
    data = sink.getvalue() if ended else sink.getvalue().removesuffix(end)
    result = read(tmp_path_factory.getbasetemp(), "a.csv", data.encode(), Shape("csv", delimiter=delimiter))
    assert [(item.id, item.text, json.loads(item.meta).get("note", "")) for item in result] == [
        (f"d{number}", f"x{row[0]}", row[1]) for number, row in enumerate(rows)]
    for entry in result:
        offset = json.loads(entry.meta)["_offset"]
        begin = data.encode()[offset:].decode().lstrip('"')
        assert begin.startswith(entry.id)


@given(line=st.text(alphabet='a",', max_size=12))
@settings(max_examples=300, deadline=None)
def test_any_row_is_split_as_the_csv_module_splits_it(line):
    try:
        result = split_line(line, ",")
    except MalformedError:
        with pytest.raises(csv.Error):
            list(csv.reader([line], strict=True))
        return
    assert result == (next(csv.reader([line])) or [""])


@pytest.mark.parametrize(("rows", "result"), [
    ('1,a\n2\n3,b,c\n4,d\n', ["a", "wrong_fields", "wrong_fields", "d"]),
    ('1,a\n2,"never closed\n3,b\n4,c\n', ["a", "invalid_csv", "b", "c"]),
    ('1,5" disk\n2,b\n', ['5" disk', "b"]),
    ('1,"a\nb"\n\n2,"say ""hi"""\n', ["a\nb", 'say "hi"']),
    ('1,\n,b\n', ["empty_text", "b"]),
    (f'1,{"x" * 300}\n2,b\n3,"{"y" * 90}\n{"y" * 90}\n{"y" * 90}"\n4,c\n',
     ["record_too_long", "b", "record_too_long", "c"])])
def test_a_bad_row_affects_no_other(tmp_path, rows, result):
    outcome = read(tmp_path, "a.csv", f"id,text\n{rows}".encode(), max_record_bytes=200)
    assert told(outcome) == result


def test_a_row_that_is_not_utf_8_and_a_file_that_is_cut_off(tmp_path):
    data = b"id,text\n" + b"".join(b"%d,text %d\n" % (number, number * 7919) for number in range(20_000))
    result = read(tmp_path, "a.csv", data[:20] + b"\xff" + data[20:])
    assert [item.reason for item in result if isinstance(item, Bad)] == ["wrong_encoding"]
    result = read(tmp_path, "a.csv.gz", PACK[".gz"](data)[:-500])
    assert [item.reason for item in result if isinstance(item, Bad)] == ["truncated_file"]
    assert len(result) > 10_000


def test_rows_have_their_line(tmp_path):
    result = read(tmp_path, "a.csv", b'id,text\n1,"a\nb"\n2,c\n')
    assert [item.line for item in result] == [2, 4]


VALUE = st.recursive(st.none() | st.integers() | st.text(alphabet='ab"\\{}[],\n\u00e9', max_size=8),
                     lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a{", max_size=2), inner,
                                                                                max_size=3), max_leaves=6)


@given(notes=st.lists(VALUE, min_size=1, max_size=6), indent=st.sampled_from([None, 0, 2]),
       is_array=st.booleans(), is_ascii=st.booleans(), size=st.sampled_from([1, 2, 3, 7, 64, 1 << 20]))
@examples(80)
def test_output_of_the_json_module_round_trips(tmp_path_factory, notes, indent, is_array, is_ascii, size):
    rows = [{"id": str(number), "text": f"t{number}", "note": note} for number, note in enumerate(notes)]
    parts = [json.dumps(row, indent=indent, ensure_ascii=is_ascii) for row in rows]
    data = (f"[{', '.join(parts)}]\n" if is_array else "\n".join(parts)).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "_READ_BYTES", size)
        result = read(tmp_path_factory.getbasetemp(), "a.json", data, Shape("json"))
    assert [item.id for item in result] == [row["id"] for row in rows]
    assert [json.loads(item.meta)["note"] for item in result] == notes
    for entry in result:
        assert data[entry.offset:].startswith(b"{")
        assert data[: entry.offset].count(b"\n") + 1 == entry.line


@pytest.mark.parametrize("size", [100, 5000, 1 << 20])
def test_very_many_brackets(tmp_path, size):
    """Taken at a stretch: a stretch may end anywhere, and at any depth."""
    values = [f'{"[" * number}{"{}," * number}1{"]" * number}' for number in range(1, 400, 7)]
    values += [f'[{"[]," * number}"]}}", {"[1,{}]," * number}1]' for number in range(0, 900, 9)]
    data = ",".join(f'{{"text": "{number}", "n": {value}}}' for number, value in enumerate(values))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "_READ_BYTES", size)
        result = read(tmp_path, "a.json", f"[{data}]".encode(), Shape("json"))
    assert [json.loads(item.meta)["n"] for item in result] == [json.loads(value) for value in values]


def test_brackets_cost_no_more_than_text(tmp_path):
    began = time.process_time()
    assert told(read(tmp_path, "a.json", b"[" * 10_000_000, Shape("json"))) == ["truncated_file"]
    assert time.process_time() - began < 5, "one by one they take half a minute"


@pytest.mark.parametrize(("data", "result"), [
    ('[{"text": "a"}, 3, "b", [1], {"text": "c"}]', ["a", "not_an_object", "not_an_object", "not_an_object", "c"]),
    ('[{"text": "a"}, {"text" "b"}, nonsense, {"text": "c"}]', ["a", "invalid_json", "invalid_json", "c"]),
    ('[{"text": "a"}, {"text": "b', ["a", "truncated_file"]),
    ('[{"text": "a"},', ["a", "truncated_file"]),
    ('[{"text": "a"}] {"text": "b"}', ["a", "b"]),
    (f'[{{"text": "{"x" * 300}"}}, {{"text": "b"}}]', ["record_too_long", "b"]),
    ("[]", [])])
def test_a_bad_value_affects_no_other(tmp_path, data, result):
    assert told(read(tmp_path, "a.json", data.encode(), max_record_bytes=200)) == result


def test_a_packed_array_that_is_cut_off(tmp_path):
    rows = [{"text": f"text {number * 7919}"} for number in range(50_000)]
    result = read(tmp_path, "a.json.gz", PACK[".gz"](json.dumps(rows).encode())[:-500], format="json")
    assert [item.reason for item in result if isinstance(item, Bad)] == ["truncated_file"]
    assert len(result) > 10_000


NESTED = [{"data": {"text": "a", "n": 1}, "info": {"id": "x", "deep": {"url": "u"}}},
          {"data": {"text": "b", "n": 2}, "info": {"id": "y", "deep": {"url": "v"}}},
          {"data": None, "info": None}]
FIELDS = {"text": "data.text", "id": "info.id", "url": "info.deep.url"}


def test_nested_fields_of_json(tmp_path):
    result = read(tmp_path, "a.jsonl", "\n".join(map(json.dumps, NESTED)).encode(), **FIELDS)
    assert told(result) == ["a", "b", "missing_text"]
    assert result[0].id == "x"
    meta = json.loads(result[0].meta)
    assert meta == {"data": {"n": 1}, "url": "u", "_file": "a.jsonl", "_line": 1, "_offset": 0}, "no second copy"


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_nested_fields_of_columns(tmp_path, ending):
    sink, table = io.BytesIO(), pa.Table.from_pylist(NESTED)
    if ending == "parquet":
        pq.write_table(table, sink)
    else:
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    result = read(tmp_path, f"a.{ending}", sink.getvalue(), **FIELDS)
    assert told(result) == ["a", "b", "missing_text"]
    assert [(item.id, json.loads(item.meta)["url"]) for item in result[:2]] == [("x", "u"), ("y", "v")]


def test_a_field_of_that_very_name_comes_first(tmp_path):
    found, = read(tmp_path, "a.jsonl", b'{"data.text": "flat", "data": {"text": "nested"}}', text="data.text")
    assert found.text == "flat"
    assert json.loads(found.meta)["data"] == {"text": "nested"}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_nested_messages(tmp_path, ending):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([{"chat": {"turns": talk}}]), sink)
    data = sink.getvalue() if ending == "parquet" else json.dumps({"chat": {"turns": talk}}).encode()
    found, = read(tmp_path, f"a.{ending}", data, kind="chat", messages="chat.turns")
    assert json.loads(found.meta)["messages"] == talk
