"""Tests of the hashes of documents for exact deduplication."""

import numpy as np
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.data import text
from tidewheel.data.text import hashing


@given(st.lists(st.text(max_size=40), max_size=8))
@settings(max_examples=50, deadline=None)
def test_hashes_equal_xxh3_of_the_normalised_text(texts: list[str]):
    result = hashing.text_hashes(texts)
    assert result.shape == (len(texts), 2)
    assert result.dtype == np.uint64
    for row, normal, raw in zip(result, text.normalise(texts, keep_digits=True).to_pylist(), texts, strict=True):
        expected = xxhash.xxh3_128_intdigest(normal.encode()) if normal else xxhash.xxh3_128_intdigest(
            raw.encode(), seed=1)
        assert int(row[0]) << 64 | int(row[1]) == expected


def test_case_and_punctuation_are_ignored_and_digits_count():
    same = hashing.text_hashes(["Hello, World 12", "hello world\n12", "HÉLLO — world: 12"])
    assert len(np.unique(same, axis=0)) == 1
    other = hashing.text_hashes(["Chapter 12", "Chapter 13", "!!!", "???", "", "   "])
    assert len(np.unique(other, axis=0)) == 6


def test_chunks_do_not_change_hashes(monkeypatch):
    texts = [f"document {number} " * (number % 7) for number in range(200)]
    whole = hashing.text_hashes(texts)
    monkeypatch.setattr(text.chunks, "__defaults__", (64,))
    np.testing.assert_array_equal(hashing.text_hashes(texts), whole)
