"""Tests of the deduplication of lines and paragraphs, compared with a search in Python."""

from __future__ import annotations

import itertools
import re

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tidewheel.data import text
from tidewheel.data.dedup import ORDER_COLUMNS
from tidewheel.data.dedup import lines as dedup_lines

PIECES = ["alpha beta", "Alpha, beta!", "gamma", "x", "----", "", "  ", "delta epsilon zeta", "終わり です", "\t7 8"]
texts = st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from(["\n", "\n\n", "\r\n", "\n \n"])), max_size=8).map(
    lambda parts: "".join(piece + end for piece, end in parts))
corpora = st.lists(st.tuples(texts, st.sampled_from(["", "gamma", "alpha beta"])).map("".join), max_size=6)


def order(count, priorities=None):
    columns = {"id": [f"{number:02d}" for number in range(count)], "priority": priorities or [0] * count,
               "quality": [0.0] * count, "length": [10] * count}
    return pa.table([pa.array(columns[name], kind) for name, kind in ORDER_COLUMNS], schema=pa.schema(ORDER_COLUMNS))


def pieces_of(document, unit):
    """Return the pieces of a document, split in Python."""
    lines = re.findall(r"[^\n]*\n|[^\n]+", document)
    if unit == "line":
        return lines
    paragraphs = []
    blank_before = True
    for index, line in enumerate(lines):
        blank = not line.strip()
        if index == 0 or (not blank and blank_before):
            paragraphs.append("")
        paragraphs[-1] += line
        blank_before = blank
    return paragraphs


def key_of(piece, min_characters):
    if len(piece.strip()) < min_characters or not any(character.isalnum() for character in piece):
        return None
    return text.normalise([piece], keep_digits=True)[0].as_py()


def by_search(documents, ranks, unit, min_characters, max_repeats, keep):
    owners = {}
    for index in sorted(range(len(documents)), key=lambda index: ranks[index]):
        for key in dict.fromkeys(key_of(piece, min_characters) for piece in pieces_of(documents[index], unit)):
            if key is not None:
                owners.setdefault(key, []).append(index)
    kept = {}
    for key, indices in owners.items():
        repeated = len(indices) > max_repeats
        kept[key] = (indices[:max_repeats] if keep == "first" else []) if repeated else indices
    edited = []
    for index, document in enumerate(documents):
        pieces = pieces_of(document, unit)
        left = [piece for piece in pieces if (key := key_of(piece, min_characters)) is None or index in kept[key]]
        edited.append("".join(left).strip("\r\n") if len(left) < len(pieces) else document)
    return edited


@examples(60)
@given(corpora, st.sampled_from(["line", "paragraph"]), st.integers(1, 12), st.integers(1, 3),
       st.sampled_from(["first", "none"]), st.data())
def test_cut_equals_a_search_in_python(documents, unit, min_characters, max_repeats, keep, data):
    priorities = data.draw(st.lists(st.integers(0, 3), min_size=len(documents), max_size=len(documents)))
    column = pa.array(documents, pa.large_string())
    rows = dedup_lines.rows(column, order(len(documents), priorities), unit, min_characters)
    repeated = dedup_lines.repeats(rows, max_repeats=max_repeats, keep=keep)
    table = pa.table({"id": order(len(documents))["id"], "text": column})
    cut = dedup_lines.cut(table, repeated, unit, min_characters)
    ranks = [(-priority, index) for index, priority in enumerate(priorities)]
    assert cut.texts.to_pylist() == by_search(documents, ranks, unit, min_characters, max_repeats, keep)


@settings(deadline=None)
@given(corpora, st.sampled_from(["line", "paragraph"]))
def test_split_equals_splitting_in_python(documents, unit):
    column = pa.concat_arrays([pa.array(["before\n"], pa.large_string()), pa.array(documents, pa.large_string())])
    pieces = dedup_lines.split(column.slice(1), unit)
    strings = pieces.texts.to_pylist()
    ends = pieces.offsets.tolist()
    assert [strings[first:last] for first, last in itertools.pairwise(ends)] == [
        pieces_of(document, unit) for document in documents]


def test_cut_returns_counts_of_pieces_and_survivors():
    documents = ["Read our cookie notice.\nfirst text here\n", "second text here\nread our COOKIE notice\n",
                 "Read our cookie notice.\nread our cookie notice\nfirst text here"]
    table = pa.table({"id": ["00", "01", "02"], "text": pa.array(documents, pa.large_string())})
    rows = dedup_lines.rows(table["text"], order(3, [0, 1, 0]), "line", 5)
    repeated = dedup_lines.repeats(rows, max_repeats=1, keep="first")
    assert sorted(repeated.select(["id", "survivor"]).to_pylist(), key=str) == sorted([
        {"id": "00", "survivor": "01"}, {"id": "02", "survivor": "01"}, {"id": "02", "survivor": "00"}], key=str)
    cut = dedup_lines.cut(table, repeated, "line", 5)
    assert cut.texts.to_pylist() == ["first text here", documents[1], ""]
    assert cut.pieces.tolist() == [1, 0, 3]
    assert cut.survivors == ["01", None, "01"]


@pytest.mark.parametrize("keep", ["first", "none"])
def test_no_documents_give_no_rows(keep):
    rows = dedup_lines.rows(pa.array([], pa.large_string()), order(0), "line", 1)
    assert rows.schema == dedup_lines.ROW_SCHEMA
    assert len(dedup_lines.repeats(rows, max_repeats=1, keep=keep)) == 0


def test_repeats_do_not_depend_on_the_order_of_rows():
    documents = pa.array(["same line of text\nown"] * 5, pa.large_string())
    rows = dedup_lines.rows(documents, order(5, [2, 0, 3, 3, 1]), "line", 3)
    repeated = dedup_lines.repeats(rows, max_repeats=2, keep="first")
    shuffled = dedup_lines.repeats(rows.take(pa.array([*range(1, len(rows)), 0][::-1])), max_repeats=2, keep="first")
    key = [("id", "ascending"), ("hash_hi", "ascending")]
    assert repeated.sort_by(key).equals(shuffled.sort_by(key))
    assert set(repeated["id"].to_pylist()) == {"00", "01", "04"}
    assert set(repeated["survivor"].to_pylist()) == {"02"}
