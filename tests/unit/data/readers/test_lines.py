"""Reading JSONL: any line is a record or a bad record, and good records round-trip."""

from __future__ import annotations

import functools
import gzip
import json
import random
import subprocess
import sys

import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tidewheel.data.compression import packing_of
from tidewheel.data.config import ReadConfig
from tidewheel.data.document import content_id
from tidewheel.data.quarantine import REASONS, Bad
from tidewheel.data.readers import Record, Shape, UnreadableFile, ranges, read_records
from tidewheel.data.readers.lines import is_blank, parse
from tidewheel.data.readers.packed import encoding_of
from tidewheel.errors import InputError
from tidewheel.storage import content_hash, store

CONFIG = ReadConfig(paths=("*",))


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


PACK = {"": lambda data: data, ".gz": gzip.compress, ".zst": zstd}


def read(tmp_path, data, ending="", **settings):
    name = f"file.jsonl{ending}"
    (tmp_path / name).write_bytes(data)
    return list(read_records(store(tmp_path), name, ReadConfig(paths=("*",), **settings)))


def lines(*values):
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


@pytest.mark.parametrize("ending", PACK)
def test_records_round_trip(tmp_path, ending):
    values = [{"id": f"d{number}", "text": f"Ünï {number}\n" * (number % 50 + 1), "source": "s", "lang": "de"}
              for number in range(3000)]
    result = read(tmp_path, PACK[ending](lines(*values)), ending)
    assert [(item.id, item.text, item.source) for item in result] == [
        (value["id"], value["text"], value["source"]) for value in values]
    meta = json.loads(result[6].meta)
    assert meta.pop("_offset") == result[6].offset
    assert meta == {"lang": "de", "_file": f"file.jsonl{ending}", "_line": 7}


@pytest.mark.parametrize("ending", PACK)
def test_locations_point_at_the_raw_record(tmp_path, ending):
    data = b'\n{"text": "a"}\r\n   \n{"text": ""}\n{"text": 3}\nno json\n{"text": "last, without a line end"}'
    result = read(tmp_path, PACK[ending](data), ending)
    assert [item.line for item in result] == [2, 4, 5, 6, 7]
    for entry in result:
        raw = data[entry.offset :].split(b"\n")[0].rstrip(b"\r")
        if isinstance(entry, Bad):
            assert entry.hash == content_hash(raw)
            assert entry.head == raw.decode()


@pytest.mark.parametrize(("raw", "reason"), [
    (b'{"text": "caf\xe9"}', "wrong_encoding"),
    ('{"text": "a"}'.encode("utf-16"), "wrong_encoding"),
    (b'{"text": "a"', "invalid_json"),
    (b"plain words", "invalid_json"),
    (b"[" * 100_000, "invalid_json"),
    (b'{"text": ' + b"9" * 10_000 + b"}", "invalid_json"),
    (b'"text"', "not_an_object"),
    (b'["text"]', "not_an_object"),
    (b"null", "not_an_object"),
    (b'{"txt": "a"}', "missing_text"),
    (b'{"text": null}', "missing_text"),
    (b'{"text": 3}', "text_not_string"),
    (b'{"text": ["a"]}', "text_not_string"),
    (b'{"text": ""}', "empty_text"),
    (b'{"text": " \\n\\t\\u2003"}', "empty_text"),
    (b'{"text": "a\\u0000b"}', "null_bytes"),
    (b'{"text": "a\\ud800b"}', "invalid_unicode"),
    (b'{"text": "a", "id": ""}', "invalid_id"),
    (b'{"text": "a", "id": {}}', "invalid_id"),
    (b'{"text": "a", "id": true}', "invalid_id"),
    (b'{"text": "a", "id": "\\udfff"}', "invalid_id"),
    (b'{"text": "a", "source": 5}', "invalid_source"),
])
def test_each_fault_has_its_reason(raw, reason):
    result = parse(raw, CONFIG, file="f", line=3, offset=10)
    assert isinstance(result, Bad)
    assert result.reason == reason
    assert reason in REASONS
    assert (result.line, result.offset, result.hash) == (3, 10, content_hash(raw))


def test_ids_are_given_or_computed_from_content():
    def identity(raw, config=CONFIG):
        return parse(raw, config, file="f", line=1, offset=0).id

    assert identity(b'{"text": "a", "id": "x"}') == "x"
    assert identity(b'{"text": "a", "id": 17}') == "17"
    assert identity(b'{"text": "a"}') == identity(b'{"text": "a", "id": null}') == content_id("a")
    assert identity(b'{"text": "a", "id": "x"}', ReadConfig(paths=("*",), id=None)) == content_id("a")


def test_fields_can_have_other_names():
    config = ReadConfig(paths=("*",), text="body", id="url", source=None)
    result = parse(b'{"body": "a", "url": "u", "source": "kept"}', config, file="f.jsonl", line=1, offset=0)
    assert isinstance(result, Record)
    assert (result.id, result.text, result.source) == ("u", "a", "f.jsonl")
    assert json.loads(result.meta)["source"] == "kept"


def test_unusual_values_in_other_fields_are_harmless():
    result = parse(b'{"text": "a", "x": NaN, "y": "\\ud800", "_file": "mine"}', CONFIG, file="f", line=1, offset=0)
    meta = json.loads(result.meta)
    assert meta["x"] is None
    assert meta["_file"] == "f"
    result.meta.encode()


def test_a_byte_order_mark_is_not_part_of_the_first_record(tmp_path):
    assert read(tmp_path, b"\xef\xbb\xbf" + lines({"text": "a"}))[0].text == "a"


@pytest.mark.parametrize("data", [b"", b"\n\n  \n"])
@pytest.mark.parametrize("ending", PACK)
def test_files_without_records(tmp_path, data, ending):
    assert read(tmp_path, PACK[ending](data), ending) == []


@pytest.mark.parametrize(("ending", "damage"), [
    (".gz", "flipped"), (".gz", "sum"), (".gz", "not packed"), (".zst", "not packed")])
def test_a_file_with_a_wrong_checksum_is_unreadable(tmp_path, ending, damage):
    generator = random.Random(3)
    packed = PACK[ending](lines(*({"text": f"{generator.random()} {number}"} for number in range(5000))))
    if damage == "sum":
        packed = packed[:-8] + b"\0\0\0\0" + packed[-4:]
    elif damage == "flipped":
        packed = packed[:1000] + bytes(255 - byte for byte in packed[1000:1040]) + packed[1040:]
    else:
        packed = b"\0\1\2" + lines({"text": "a"})
    with pytest.raises(UnreadableFile):
        read(tmp_path, packed, ending)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("left", [5, 0.3, 0.9, -3])
def test_records_before_the_end_of_a_truncated_file_are_kept(tmp_path, ending, left):
    generator = random.Random(3)
    values = [{"id": f"d{number}", "text": f"{generator.random()} {number}"} for number in range(20_000)]
    data = lines(*values)
    packed = PACK[ending](data)
    cut = packed[: int(len(packed) * left) if isinstance(left, float) else left]
    *good, last = read(tmp_path, cut, ending)
    assert [item.text for item in good] == [value["text"] for value in values[: len(good)]]
    assert len(good) >= len(values) * (0 if left == 5 else 0.8 if left == -3 else left - 0.2)
    assert (last.reason, last.line, last.records) == ("truncated_file", len(good) + 1, 1)
    assert last.offset == len(lines(*values[: len(good)]))


LINE = st.binary(max_size=30).map(lambda raw: raw.replace(b"\n", b"").replace(b"\r", b"")) | st.text(
    min_size=1, max_size=40).map(lambda text: json.dumps({"text": text}, ensure_ascii=False).encode(errors="replace"))


@given(pieces=st.lists(st.tuples(LINE, st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\n \n"])), max_size=12),
       bom=st.booleans(), ended=st.booleans(), size=st.integers(1, 60), limit=st.integers(5, 80))
@examples(100)
def test_ranges_of_any_size_give_the_records_of_the_whole_file(tmp_path_factory, pieces, bom, ended, size, limit):
    data = b"\xef\xbb\xbf" * bom + b"".join(line + end for line, end in pieces)
    data = data if ended else data.rstrip(b"\r\n")
    assume(not packing_of("ranges.jsonl", data) and not encoding_of(data))  # such a file is never cut
    folder_store = store(tmp_path_factory.getbasetemp())
    folder_store.write("ranges.jsonl", data)
    config = ReadConfig(paths=("*",), max_record_bytes=limit, unit_bytes=size)
    lines_of = functools.partial(read_records, shape=Shape("jsonl"))  # it may look like anything
    cut = ranges(folder_store, "ranges.jsonl", len(data), config, Shape("jsonl")) or [None]
    assert cut == [None] or [number for span in cut for number in range(*span)] == list(range(len(data)))
    results = [each for span in cut for each in lines_of(folder_store, "ranges.jsonl", config, span=span)]

    def told(each):  # all but the number of the line, which only the first range knows
        meta = json.loads(each.meta) if isinstance(each, Record) else {}
        meta.pop("_line", None)
        return {**each.__dict__, "line": 0, "meta": meta}

    assert [told(item) for item in results] == [told(item) for item in lines_of(folder_store, "ranges.jsonl", config)]
    with folder_store.open("ranges.jsonl") as stream:
        assert is_blank(stream) == (not results)


def test_compressed_and_small_files_are_not_cut_into_ranges(tmp_path):
    config = ReadConfig(paths=("*",), unit_bytes=100)
    folder_store = store(tmp_path)
    assert ranges(folder_store, "a.jsonl", 100, config, Shape("jsonl")) == []
    assert ranges(folder_store, "a.jsonl", 250, config, Shape("jsonl")) == [(0, 100), (100, 200), (200, 250)]
    for shape in (Shape("jsonl", "gzip"), Shape("jsonl", encoding="utf-16-le"), Shape("warc"), Shape("csv")):
        assert ranges(folder_store, "a.jsonl", 250, config, shape) == []


def test_url_language_and_license_go_by_canonical_names():
    def meta(raw, **names):
        result = parse(raw, ReadConfig(paths=("*",), **names), file="f", line=1, offset=0)
        if isinstance(result, Bad):
            return result.reason
        return {name: value for name, value in json.loads(result.meta).items() if name not in ("_file", "_line",
                                                                                           "_offset")}

    raw = b'{"text": "a", "url": "u", "lang": "de", "license": null, "language": "x"}'
    assert meta(raw) == {"url": "u", "lang": "de", "language": "x"}
    assert meta(raw, language="lang") == {"url": "u", "language": "de", "_language": "x"}
    assert meta(raw, url=None, language=None) == {"_url": "u", "lang": "de", "_language": "x"}
    assert meta(raw, id="url") == {"url": "u", "lang": "de", "language": "x"}
    assert meta(b'{"text": "a", "url": 5}') == "invalid_field"
    assert meta(b'{"text": "a", "license": ["x"]}') == "invalid_field"
    assert meta(b'{"text": "a", "license": ["x"]}', license=None) == {"_license": ["x"]}


def test_members_one_after_the_other_are_one_file(tmp_path):
    assert len(read(tmp_path, gzip.compress(lines({"text": "a"})) + gzip.compress(lines({"text": "b"})), ".gz")) == 2
    assert len(read(tmp_path, zstd(lines({"text": "a"})) + zstd(lines({"text": "b"})), ".zst")) == 2


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("size", [998, 999, 1000, 1001, 1002, 1003, 5000, 3_000_000])
def test_a_line_over_the_limit_affects_no_other(tmp_path, ending, size):
    long = b'{"text": "' + b"x" * (size - 12) + b'"}'
    assert len(long) == size
    data = lines({"text": "before"}) + long + b"\n" + lines({"text": "after"}) + long
    result = read(tmp_path, PACK[ending](data), ending, max_record_bytes=1000)
    good = [item.text for item in result if isinstance(item, Record)]
    if size <= 1000:
        assert good == ["before", "x" * (size - 12), "after", "x" * (size - 12)]
    else:
        assert good == ["before", "after"]
        assert [item.reason for item in result if isinstance(item, Bad)] == ["record_too_long"] * 2
        assert [item.line for item in result] == [1, 2, 3, 4]
        assert result[3].offset == len(data) - len(long)


def test_a_line_of_200_megabytes_takes_no_more_memory_than_a_record_may(tmp_path):
    code = """
import sys
from pathlib import Path
from tidewheel.data.config import ReadConfig
from tidewheel.data.readers import read_records
from tidewheel.storage import store
config = ReadConfig(paths=("*",), max_record_bytes=4 << 20)
def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
list(read_records(store(sys.argv[1]), "small.jsonl", config))
before = peak()
found = list(read_records(store(sys.argv[1]), "long.jsonl", config))
print([each.reason for each in found], peak() - before >> 10)
"""
    (tmp_path / "small.jsonl").write_bytes(lines({"text": "a"}))
    with (tmp_path / "long.jsonl").open("wb") as sink:
        sink.truncate(200_000_000)  # a sparse file: null bytes, and no line end
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=True, text=True,
                          env={"PYTHONPATH": ":".join(sys.path)}).stdout
    reason, megabytes = done.rsplit(maxsplit=1)
    assert reason == "['record_too_long']"
    assert 4 <= int(megabytes) < 32


def test_a_removed_file_raises_input_error(tmp_path):
    with pytest.raises(InputError, match="has been removed"):
        list(read_records(store(tmp_path), "none.jsonl", CONFIG))


@given(data=st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_one_result_per_line(data):
    for line in data.split(b"\n"):
        result = parse(line, CONFIG, file="f", line=1, offset=0)
        if isinstance(result, Bad):
            assert result.reason in REASONS
        else:
            result.text.encode()
            result.meta.encode()


@given(values=st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text()),
                              max_size=4), text=st.text(min_size=1), identity=st.text(min_size=1) | st.integers())
@settings(max_examples=200, deadline=None)
def test_good_records_are_exact(values, text, identity):
    taken = ("source", "url", "language", "license", "_file", "_line", "_offset")
    values = {name: value for name, value in values.items() if name not in taken}
    result = parse(json.dumps({**values, "text": text, "id": identity}).encode(), CONFIG, file="f", line=1, offset=0)
    if isinstance(result, Record):
        assert result.text == text
        assert result.id == str(identity)
        others = {name: value for name, value in values.items() if name not in ("text", "id")}
        assert json.loads(result.meta) == {**others, "_file": "f", "_line": 1, "_offset": 0}
    else:
        assert result.reason in ("empty_text", "null_bytes", "invalid_unicode", "invalid_id")
