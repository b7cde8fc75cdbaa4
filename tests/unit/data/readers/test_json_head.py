"""Tests that JSON over several lines and arrays of records are told from JSONL, with Python's `json` as oracle."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.data.readers.json_head import is_array, is_object_over_lines

VALUES = st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3) | (
    st.dictionaries(st.text(max_size=3), inner, max_size=3)), max_leaves=5)
RECORDS = st.dictionaries(st.text(min_size=1, max_size=3), VALUES, min_size=1, max_size=3)


@given(st.lists(RECORDS, min_size=1, max_size=4), st.sampled_from([None, 1, "\t"]))
def test_an_array_of_records_is_found_with_any_indentation(records: list[dict[str, object]], indent: str | int | None):
    text = json.dumps(records, indent=indent).encode()
    assert is_array(text, is_whole=True)
    assert not is_object_over_lines(text)


@given(st.lists(RECORDS, min_size=1, max_size=4))
def test_lines_of_records_are_neither(records: list[dict[str, object]]):
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    assert not is_array(text, is_whole=True)
    assert not is_object_over_lines(text)


@given(st.lists(st.lists(VALUES, max_size=3), min_size=2, max_size=4))
def test_lines_that_are_arrays_are_no_array(rows: list[list[object]]):
    assert not is_array("".join(json.dumps(row) + "\n" for row in rows).encode(), is_whole=True)


@given(RECORDS)
def test_a_record_over_several_lines_is_found(record: dict[str, object]):
    assert is_object_over_lines(json.dumps(record, indent=2).encode())


@pytest.mark.parametrize(("text", "is_whole", "expected"), [
    (b"[", False, False), (b"[]", True, True), (b"[]", False, False), (b"[1, 2]", True, False), (b'[{"a"', False, True),
    (b"[\n\n{", False, True), (b"x", True, False), (b"", True, False)])
def test_the_beginning_of_a_file_is_enough(text: bytes, is_whole: bool, expected: bool):
    assert is_array(text, is_whole=is_whole) is expected


@pytest.mark.parametrize(("text", "expected"), [
    (b'{\n "a": 1}', True), (b'{\n}', True), (b'{"a":\n1}', True), (b'{"a": 1}', False), (b'{"a": 1}\n{', False),
    (b'{broken\n"a": 1}', False), (b"[\n", False), (b"{\n" * 5000, False)])
def test_only_an_object_that_goes_on_in_the_next_line_counts(text: bytes, expected: bool):
    assert is_object_over_lines(text) is expected
