"""Word lists, against a search in Python."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.filtering import judged
from tidewheel.data import text
from tidewheel.data.filters import words
from tidewheel.data.filters.words import WordFilter
from tidewheel.errors import ConfigError

ALPHABET = ["bad", "worse", "good", "day", "of", "the", "9", "悪", "Ünder"]


def by_search(texts, entries):
    """Occurrences and words, by comparing normalised words one by one."""
    found, total = [], []
    wanted = {tuple(text.normalise([entry], keep_digits=True)[0].as_py().split()) for entry in entries} - {()}
    for item in texts:
        parts = text.normalise([item], keep_digits=True)[0].as_py().split()
        total.append(len(parts))
        found.append(sum(tuple(parts[place : place + len(entry)]) == entry
                         for entry in wanted for place in range(len(parts) - len(entry) + 1)))
    return found, total


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from(ALPHABET), max_size=30).map(" ".join), max_size=5),
       st.lists(st.lists(st.sampled_from(ALPHABET), max_size=4).map("-".join), max_size=5))
def test_counts_match_a_naive_search(texts, entries):
    found, total = words.count(pa.array(texts, pa.large_string()), words.hashed(entries))
    assert (found.tolist(), total.tolist()) == by_search(texts, entries)


def test_phrases_do_not_cross_documents():
    found, _ = words.count(["a bad", "day b", "bad day"], words.hashed(["bad day"]))
    assert found.tolist() == [0, 0, 1]


def test_documents_of_several_chunks(monkeypatch):
    monkeypatch.setattr(text, "CHUNK_BYTES", 8)
    monkeypatch.setattr(text.chunks, "__defaults__", (8,))
    found, total = words.count(["good bad bad", "", "bad day", "x"], words.hashed(["bad", "bad day"]))
    assert found.tolist() == [2, 0, 2, 0]
    assert total.tolist() == [3, 0, 2, 1]


def test_limits():
    texts = ["bad", "bad " + "good " * 9, "bad " + "good " * 99, "Badly good", "BAD!"]
    reasons, statistics = judged(texts, WordFilter(words=("bad",)))
    assert reasons == ["listed_words"] * 3 + ["", "listed_words"]
    assert statistics["listed_words"].tolist() == [1, 1, 1, 0, 1]
    assert np.allclose(statistics["listed_word_share"], [1, 0.1, 0.01, 0, 1])
    reasons, _ = judged(texts, WordFilter(words=("bad",), max_count=None, max_share=0.05))
    assert reasons == ["listed_words", "listed_words", "", "", "listed_words"]
    assert judged([], WordFilter(words=("bad",)))[0] == []


def test_entries_come_from_files(tmp_path):
    (tmp_path / "en").write_text("bad day\n2 girls\n")
    reasons, _ = judged(["a bad day", "bad", "2 girls", "3 girls"], WordFilter(files=(str(tmp_path / "en"),)))
    assert reasons == ["listed_words", "", "listed_words", ""]


@pytest.mark.parametrize(("settings", "message"), [
    ({}, "give words"), ({"words": ["x"], "max_count": None}, "give max_count")])
def test_settings_without_effect_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        WordFilter(**settings)
