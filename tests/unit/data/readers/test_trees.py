"""Reading trees of text: each file is a document, and its path is the id."""

from __future__ import annotations

import gzip
import json

import pytest

from tidewheel.data.config import ReadConfig
from tidewheel.data.document import content_id
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers import read_records, shape_of
from tidewheel.storage import store


def read(tmp_path, data, name="books/one.txt", **settings):
    store(tmp_path).write(name, data)
    return list(read_records(store(tmp_path), name, ReadConfig(paths=("*",), **settings)))


@pytest.mark.parametrize(("name", "pack"), [("books/one.txt", bytes), ("books/one.md.gz", gzip.compress)])
def test_the_path_is_the_id_and_the_folder_the_source(tmp_path, name, pack):
    found, = read(tmp_path, pack("\ufeffÜber\r\nuns\n".encode()), name)
    assert (found.id, found.source, found.text) == (name, "books", "Über\r\nuns\n")
    assert json.loads(found.meta) == {"_file": name, "_line": 1, "_offset": 0}
    found, = read(tmp_path, pack(b"x"), "top" + name.removeprefix("books/one"))
    assert found.source == "."


def test_mapping_applies(tmp_path):
    found, = read(tmp_path, b"hello", text="body", id=None, source=None)
    assert (found.id, found.source, found.text) == (content_id("hello"), "books/one.txt", "hello")


@pytest.mark.parametrize(("data", "reason"), [(b"caf\xe9", "wrong_encoding"), (b"a\0b", "null_bytes"),
                                              (b" \n", "empty_text"), (b"x" * 11, "record_too_long")])
def test_faults(tmp_path, data, reason):
    found, = read(tmp_path, data, max_record_bytes=10)
    assert isinstance(found, Bad)
    assert found.reason == reason


def test_an_empty_file_has_no_record_and_a_truncated_one_is_bad(tmp_path):
    assert read(tmp_path, b"") == []
    found, = read(tmp_path, gzip.compress(b"hello world")[:-9], "a.txt.gz")
    assert found.reason == "truncated_file"


@pytest.mark.parametrize(("key", "kind"), [
    ("a/b.jsonl", "jsonl"), ("b.json.zst", "jsonl"), ("part-0000", "jsonl"), ("b.parquet", "parquet"),
    ("b.PARQUET", "parquet"), ("b.feather", "arrow"), ("b.arrow", "arrow"), ("b.md", "text"), ("b.txt.gz", "text"),
    ("CC-1.warc.gz", "warc"), ("CC-1.warc.wet.gz", "warc"), ("b.wet", "warc")])
def test_formats_by_ending(tmp_path, key, kind):
    folder_store = store(tmp_path)
    folder_store.write(key, b"")
    assert shape_of(folder_store, key, ReadConfig(paths=("*",))).format == kind
    assert shape_of(folder_store, key, ReadConfig(paths=("*",), format="text")).format == "text"
