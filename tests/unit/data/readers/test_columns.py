"""Reading Parquet and Arrow: a bad value affects only its row, and a damaged file is unreadable as a whole."""

from __future__ import annotations

import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from tidewheel.data.config import ReadConfig
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers import UnreadableFile, ranges, read_records
from tidewheel.storage import store

KINDS = ["parquet", "arrow", "stream", "feather"]


def write(folder, kind, table):
    name = "file.arrow" if kind == "stream" else f"file.{kind}"
    path = str(folder / name)
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=700)
    elif kind == "feather":
        feather.write_feather(table, path)
    else:
        with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(path, table.schema) as sink:
            sink.write_table(table, max_chunksize=900)
    return name


def read(folder, name, span=None, **settings):
    return list(read_records(store(folder), name, ReadConfig(paths=("*",), text="body", **settings), span=span))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("string", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_rows_round_trip(tmp_path, kind, string):
    texts = [f"Ünï {number}" for number in range(2500)]
    table = pa.table({"body": pa.array(texts).cast(string), "id": list(range(2500)), "other": texts})
    result = read(tmp_path, write(tmp_path, kind, table))
    assert [(item.id, item.text, item.line) for item in result] == [
        (str(number), text, number + 1) for number, text in enumerate(texts)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_value_affects_only_its_row(tmp_path, kind):
    raw = pa.array([b"good", None, b"caf\xe9", b" ", b"a\x00b", b"x" * 50, b"last"])
    body = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
    result = read(tmp_path, write(tmp_path, kind, pa.table({"body": body})), max_record_bytes=20)
    assert [item.reason if isinstance(item, Bad) else item.text for item in result] == [
        "good", "missing_text", "wrong_encoding", "empty_text", "null_bytes", "record_too_long", "last"]
    assert [item.line for item in result] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("column", "reason"), [
    ({"body": [1, 2]}, "text_not_string"), ({"body": [b"a", b"b"]}, "text_not_string"),
    ({"body": [["a"], ["b"]]}, "text_not_string"), ({"text": ["a", "b"]}, "missing_text"),
    ({"body": ["a", "b"], "id": [1.5, 2.5]}, "invalid_id"), ({"body": ["a", "b"], "source": [1, 2]}, "invalid_source")])
def test_columns_of_the_wrong_type(tmp_path, kind, column, reason):
    result = read(tmp_path, write(tmp_path, kind, pa.table(column)))
    assert [item.reason for item in result if isinstance(item, Bad)] == [reason] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_cut_off_is_unreadable(tmp_path, kind):
    name = write(tmp_path, kind, pa.table({"body": [f"text {number}" for number in range(5000)]}))
    data = (tmp_path / name).read_bytes()
    for size in (3, 100, len(data) // 2):
        (tmp_path / name).write_bytes(data[:size])
        if kind == "stream" and size > 1000:  # a stream has no table of contents: what came is kept
            *good, last = read(tmp_path, name)
            assert [item.text for item in good] == [f"text {number}" for number in range(1800)]
            assert (last.reason, last.offset) == ("damaged_rows", 1800)
        else:
            with pytest.raises(UnreadableFile):
                read(tmp_path, name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_no_bytes_has_no_records(tmp_path, kind):
    name = write(tmp_path, kind, pa.table({"body": ["a"]}))
    (tmp_path / name).write_bytes(b"")
    assert read(tmp_path, name) == []


@pytest.mark.parametrize("kind", KINDS)
def test_other_scalar_columns_are_carried_along(tmp_path, kind):
    table = pa.table({
        "body": ["a", "b"], "url": ["u", None], "lang": ["de", "en"], "score": [0.5, float("nan")], "n": [1, None],
        "flag": [True, False], "day": pa.array([0, 1], pa.date32()), "at": pa.array([0, 1], pa.timestamp("ns", "UTC")),
        "price": pa.array([Decimal("1.00"), Decimal("2.00")]), "raw": [b"x", b"y"], "list": [[1], [2]]})
    result = read(tmp_path, write(tmp_path, kind, table), language="lang")
    meta = [json.loads(item.meta) for item in result]
    assert meta[0].pop("at").startswith("1970-01-01 00:00:00")
    assert meta[1].pop("at").startswith("1970-01-01 00:00:00.000000001")
    name = meta[0]["_file"]
    assert meta == [
        {"url": "u", "language": "de", "score": 0.5, "n": 1, "flag": True, "day": "1970-01-01", "price": "1.00",
         "_file": name, "_line": 1, "_offset": 0},
        {"language": "en", "flag": False, "day": "1970-01-02", "price": "2.00", "_file": name, "_line": 2,
         "_offset": 1}]


@pytest.mark.parametrize("size", [1, 4000, 20_000, 1 << 30])
def test_ranges_of_row_groups_give_the_rows_of_the_whole_file(tmp_path, size):
    name = write(tmp_path, "parquet", pa.table({"body": [f"text {number}" for number in range(5000)]}))
    cut = ranges(store(tmp_path), name, (tmp_path / name).stat().st_size, ReadConfig(paths=("*",), unit_bytes=size))
    assert (len(cut) > 1) == (size < 1 << 20)
    assert [each for span in cut or [None] for each in read(tmp_path, name, span)] == read(tmp_path, name)


def test_a_damaged_row_group_affects_no_other(tmp_path):
    name = "file.parquet"
    texts = [f"{number * 7919} text {number}" for number in range(2100)]
    pq.write_table(pa.table({"body": texts}), tmp_path / name, row_group_size=700, write_page_checksum=True,
                   use_dictionary=False)
    data = bytearray((tmp_path / name).read_bytes())
    group = pq.ParquetFile(tmp_path / name).metadata.row_group(1).column(0)
    data[group.data_page_offset + group.total_compressed_size // 2] ^= 1
    (tmp_path / name).write_bytes(data)
    result = read(tmp_path, name)
    bad = [item for item in result if isinstance(item, Bad)]
    assert [(item.reason, item.offset, item.records) for item in bad] == [("damaged_rows", 700, 700)]
    assert [item.text for item in result if not isinstance(item, Bad)] == texts[:700] + texts[1400:]
    assert result == [each for span in [(0, 1), (1, 2), (2, 3)] for each in read(tmp_path, name, span)]


@pytest.mark.parametrize("kind", KINDS)
def test_chats_are_read_from_nested_columns(tmp_path, kind):
    messages = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]]
    result = read(tmp_path, write(tmp_path, kind, pa.table({"messages": messages})), kind="chat")
    assert "hello" in result[0].text
    assert json.loads(result[0].meta)["messages"] == messages[0]
