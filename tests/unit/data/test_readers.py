"""Reading JSONL: whatever the bytes, each line is a record or a bad record, and good ones come out as they went in."""

from __future__ import annotations

import gzip
import json
import random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.data.config import ReadConfig
from tidewheel.data.document import content_id
from tidewheel.data.quarantine import REASONS, Bad
from tidewheel.data.readers import Record, UnreadableFile, parse, read_records
from tidewheel.errors import InputError
from tidewheel.storage import content_hash, store

CONFIG = ReadConfig(paths=("*",))


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


PACK = {"": lambda data: data, ".gz": gzip.compress, ".zst": zstd}


def read(tmp_path, data, ending="", config=CONFIG, **options):
    name = f"file.jsonl{ending}"
    (tmp_path / name).write_bytes(data)
    return list(read_records(store(tmp_path), name, config, **options))


def lines(*values):
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


@pytest.mark.parametrize("ending", PACK)
def test_records_come_out_as_they_went_in(tmp_path, ending):
    values = [{"id": f"d{number}", "text": f"Ünï {number}\n" * (number % 50 + 1), "source": "s", "lang": "de"}
              for number in range(3000)]
    found = read(tmp_path, PACK[ending](lines(*values)), ending)
    assert [(each.id, each.text, each.source) for each in found] == [
        (value["id"], value["text"], value["source"]) for value in values]
    assert json.loads(found[6].meta) == {"lang": "de", "_file": f"file.jsonl{ending}", "_line": 7}


@pytest.mark.parametrize("ending", PACK)
def test_places_point_at_the_raw_record(tmp_path, ending):
    data = b'\n{"text": "a"}\r\n   \n{"text": ""}\n{"text": 3}\nno json\n{"text": "last, without a line end"}'
    found = read(tmp_path, PACK[ending](data), ending)
    assert [each.line for each in found] == [2, 4, 5, 6, 7]
    for each in found:
        raw = data[each.offset :].split(b"\n")[0].rstrip(b"\r")
        if isinstance(each, Bad):
            assert each.hash == content_hash(raw)
            assert each.head == raw.decode()


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
    found = parse(raw, CONFIG, file="f", line=3, offset=10)
    assert isinstance(found, Bad)
    assert found.reason == reason
    assert reason in REASONS
    assert (found.line, found.offset, found.hash) == (3, 10, content_hash(raw))


def test_ids_given_numbered_or_by_content():
    def identity(raw, config=CONFIG):
        return parse(raw, config, file="f", line=1, offset=0).id

    assert identity(b'{"text": "a", "id": "x"}') == "x"
    assert identity(b'{"text": "a", "id": 17}') == "17"
    assert identity(b'{"text": "a"}') == identity(b'{"text": "a", "id": null}') == content_id("a")
    assert identity(b'{"text": "a", "id": "x"}', ReadConfig(paths=("*",), id=None)) == content_id("a")


def test_fields_can_have_other_names():
    config = ReadConfig(paths=("*",), text="body", id="url", source=None)
    found = parse(b'{"body": "a", "url": "u", "source": "kept"}', config, file="f.jsonl", line=1, offset=0)
    assert isinstance(found, Record)
    assert (found.id, found.text, found.source) == ("u", "a", "f.jsonl")
    assert json.loads(found.meta)["source"] == "kept"


def test_odd_values_in_other_fields_do_no_harm():
    found = parse(b'{"text": "a", "x": NaN, "y": "\\ud800", "_file": "mine"}', CONFIG, file="f", line=1, offset=0)
    meta = json.loads(found.meta)
    assert meta["x"] is None
    assert meta["_file"] == "f"
    found.meta.encode()


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path):
    assert read(tmp_path, b"\xef\xbb\xbf" + lines({"text": "a"}))[0].text == "a"


@pytest.mark.parametrize("data", [b"", b"\n\n  \n"])
@pytest.mark.parametrize("ending", PACK)
def test_files_without_records(tmp_path, data, ending):
    assert read(tmp_path, PACK[ending](data), ending) == []


@pytest.mark.parametrize(("ending", "damage"), [
    (".gz", "cut"), (".gz", "flipped"), (".gz", "not packed"), (".zst", "cut"), (".zst", "not packed")])
def test_what_cannot_be_unpacked_to_its_end_is_unreadable(tmp_path, ending, damage):
    generator = random.Random(3)
    packed = PACK[ending](lines(*({"text": f"{generator.random()} {number}"} for number in range(5000))))
    if damage == "cut":
        packed = packed[: len(packed) // 2]
    elif damage == "flipped":
        packed = packed[:1000] + bytes(255 - byte for byte in packed[1000:1040]) + packed[1040:]
    else:
        packed = lines({"text": "a"})
    with pytest.raises(UnreadableFile):
        read(tmp_path, packed, ending)


def test_members_one_after_the_other_are_one_file(tmp_path):
    assert len(read(tmp_path, gzip.compress(lines({"text": "a"})) + gzip.compress(lines({"text": "b"})), ".gz")) == 2
    assert len(read(tmp_path, zstd(lines({"text": "a"})) + zstd(lines({"text": "b"})), ".zst")) == 2


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("size", [998, 999, 1000, 1001, 1002, 1003, 5000, 3_000_000])
def test_lines_beyond_the_limit_are_put_aside_alone(tmp_path, ending, size):
    long = b'{"text": "' + b"x" * (size - 12) + b'"}'
    assert len(long) == size
    data = lines({"text": "before"}) + long + b"\n" + lines({"text": "after"}) + long
    found = read(tmp_path, PACK[ending](data), ending, max_record_bytes=1000)
    good = [each.text for each in found if isinstance(each, Record)]
    if size <= 1000:
        assert good == ["before", "x" * (size - 12), "after", "x" * (size - 12)]
    else:
        assert good == ["before", "after"]
        assert [each.reason for each in found if isinstance(each, Bad)] == ["record_too_long"] * 2
        assert [each.line for each in found] == [1, 2, 3, 4]
        assert found[3].offset == len(data) - len(long)


def test_a_file_that_has_gone_is_no_bad_file(tmp_path):
    with pytest.raises(InputError, match="has gone"):
        list(read_records(store(tmp_path), "none.jsonl", CONFIG))


@given(data=st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_one_result_a_line(data):
    for line in data.split(b"\n"):
        found = parse(line, CONFIG, file="f", line=1, offset=0)
        if isinstance(found, Bad):
            assert found.reason in REASONS
        else:
            found.text.encode()
            found.meta.encode()


@given(values=st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text()),
                              max_size=4), text=st.text(min_size=1), identity=st.text(min_size=1) | st.integers())
@settings(max_examples=200, deadline=None)
def test_good_records_are_exact(values, text, identity):
    values = {name: value for name, value in values.items() if name not in ("source", "_file", "_line")}
    found = parse(json.dumps({**values, "text": text, "id": identity}).encode(), CONFIG, file="f", line=1, offset=0)
    if isinstance(found, Record):
        assert found.text == text
        assert found.id == str(identity)
        others = {name: value for name, value in values.items() if name not in ("text", "id")}
        assert json.loads(found.meta) == {**others, "_file": "f", "_line": 1}
    else:
        assert found.reason in ("empty_text", "null_bytes", "invalid_unicode", "invalid_id")
