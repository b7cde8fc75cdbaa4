"""Tests of the table of tensors in a slot: where it puts them, and that damage is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.checkpoint.memory_tier.slots import HEADER_BYTES
from tidewheel.checkpoint.memory_tier.table import ALIGNMENT, Piece, lay_out, parse, tensors_start
from tidewheel.checkpoint.tensor_entry import DTYPES

PIECES = [Piece("model/a", "bfloat16", (4, 6), (2, 0), (2, 6)), Piece("step", "int64", (), (), ()),
          Piece("model/empty", "float32", (0, 3), (0, 0), (0, 3)), Piece("optimizer/b", "float32", (7,), (3,), (4,))]


@st.composite
def piece(draw: st.DrawFn) -> Piece:
    sizes = draw(st.lists(st.integers(0, 5), max_size=3))
    offsets = [draw(st.integers(0, 3)) for _ in sizes]
    shape = tuple(offset + size + draw(st.integers(0, 2)) for offset, size in zip(offsets, sizes, strict=True))
    return Piece(draw(st.text(max_size=8)), draw(st.sampled_from(sorted(DTYPES))), shape, tuple(offsets), tuple(sizes))


@given(st.lists(piece(), max_size=6))
def test_pieces_are_aligned_do_not_overlap_and_are_read_back(pieces: list[Piece]):
    text, placed, end = lay_out(pieces, {})
    assert parse(text, end) == (placed, {})
    free_from = HEADER_BYTES + len(text)
    for given_piece, one in zip(pieces, placed, strict=True):
        assert one.start % ALIGNMENT == 0
        assert one.start >= free_from
        assert (one.name, one.sizes) == (given_piece.name, given_piece.sizes)
        free_from = one.start + one.bytes
    assert end == (free_from if placed else tensors_start(len(text)))


def damaged(row: int, field: int, value: Any) -> bytes:
    rows = json.loads(lay_out(PIECES, {})[0])
    rows["pieces"][row][field] = value
    return json.dumps(rows, separators=(",", ":")).encode()


@pytest.mark.parametrize(("row", "field", "value"), [
    (0, 1, "float7"), (0, 2, [3, 6]), (0, 3, [3, 0]), (0, 3, [2]), (0, 4, [2, 7]), (0, 4, [-1, 6]), (0, 4, [2.0, 6]),
    (0, 4, [True, 6]), (0, 5, -64), (0, 5, 1 << 62), (3, 5, 1 << 20), (0, 4, 12), (0, 1, ["bfloat16"])])
def test_a_damaged_field_is_refused(row: int, field: int, value: Any):
    with pytest.raises(ValueError, match=r"count|outside|not a table"):
        parse(damaged(row, field, value), lay_out(PIECES, {})[2] + 1024)


@pytest.mark.parametrize("text", [b"", b"{}x", b"[1]", b"[[1, 2]]", b"\xff", b"7"])
def test_what_is_no_table_is_refused(text: bytes):
    with pytest.raises(ValueError):  # noqa: PT011  JSON's own error, or ours
        parse(text, 1 << 20)
