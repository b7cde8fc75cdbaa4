"""Packing of documents into rows of fixed length without losing a token.

Best fit: a document longer than a row is cut into full rows and a remainder. Pieces are placed in order of decreasing
length, each into the row with the least room that fits it; rows with room take pieces of the next window. A bitset of
the rooms of open rows makes placing a piece cost a few instructions.

Concatenation: the documents form one stream that is cut at the end of each row; only the last row is not full.

One per row: every piece has a row of its own, filled with padding, for fine-tuning with batches of similar length.

Equal input gives equal rows, regardless of threads and time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tidewheel.data.text import frozen
from tidewheel.data.text.kernel_tools import compiled

WINDOW = 1 << 20
"""Number of pieces that best fit sorts by length at a time."""
METHODS = ("best_fit", "concatenate", "one_per_row")


def pack(ids: Sequence[str] | pa.Array, tokens: np.ndarray, offsets: np.ndarray, *, sequence_length: int,
         token_dtype: str, pad_id: int, window: int = WINDOW, method: str = "best_fit",
         loss_mask: np.ndarray | None = None) -> pa.Table:
    """Pack documents into rows.

    Args:
        ids: ids of n documents.
        tokens: tokens of all documents, one after another; integers [t].
        offsets: document d is tokens[offsets[d]:offsets[d+1]], int64 [n+1]; an empty document needs no room.
        sequence_length: tokens per row, L.
        token_dtype: "uint16" or "uint32".
        pad_id: token that fills the end of a row.
        window: number of pieces that best fit sorts together. It does not change the memory that rows need.
        method: one of `METHODS`.
        loss_mask: 1 for the tokens that a model learns to predict, uint8 [t]; becomes the column of that name.

    Returns:
        A table of `shards.format.shard_schema(L, token_dtype, loss_mask is not None)`. Rows, and the segments of a row,
        are in the order of their documents.

    Raises:
        ValueError: offsets or loss_mask have the wrong size, or a token or pad_id does not fit the dtype.
    """
    from tidewheel.shards.format import shard_schema

    tokens, offsets = np.ascontiguousarray(tokens), np.ascontiguousarray(offsets, np.int64)
    _check(ids, tokens, offsets, sequence_length, token_dtype, pad_id, window)
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if loss_mask is not None and loss_mask.shape != tokens.shape:
        raise ValueError(f"loss_mask has {len(loss_mask)} values for {len(tokens)} tokens")
    if method == "concatenate":
        documents, begins, lengths, rows, count = _cut(offsets, sequence_length)
    else:
        documents, begins, lengths = _pieces(offsets, sequence_length)
        if method == "one_per_row":
            rows, count = np.arange(len(lengths)), len(lengths)
        else:
            rows, count = _place(lengths, sequence_length, window)
        order, rows = _by_first_document(rows, count)
        documents, begins, lengths = documents[order], begins[order], lengths[order]

    pieces = (offsets[documents] + begins, lengths, rows, sequence_length)
    matrix = np.full(count * sequence_length, pad_id, token_dtype)
    columns = np.zeros(len(rows), np.int32)
    used = np.zeros(count, np.int32)
    _fill(frozen(tokens.astype(token_dtype, copy=False)), *pieces, matrix, columns, used)
    mask = np.zeros(len(matrix) if loss_mask is not None else 0, np.uint8)
    if loss_mask is not None:
        _fill(frozen(loss_mask.astype(np.uint8, copy=False)), *pieces, mask, np.zeros_like(columns),
              np.zeros_like(used))
    schema = shard_schema(sequence_length, token_dtype, loss_mask is not None)
    bounds = pa.array(np.searchsorted(rows, np.arange(count + 1)).astype(np.int32))
    names = pa.array(ids, pa.string()) if not isinstance(ids, pa.Array | pa.ChunkedArray) else ids.cast(pa.string())
    values = {
        "segment_starts": pa.array(columns),
        "document_ids": names.take(pa.array(documents)),
        "document_offsets": pa.array(begins),
    }
    arrays: list[pa.Array] = []
    for field in schema:
        if field.name in ("tokens", "loss_mask"):
            values_of = pa.array(matrix if field.name == "tokens" else mask)
            arrays.append(pa.FixedSizeListArray.from_arrays(values_of, type=field.type))
        elif field.name == "length":
            arrays.append(pa.array(used))
        else:
            column = values[field.name]
            column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
            arrays.append(pa.ListArray.from_arrays(bounds, column, type=field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def utilisation(table: pa.Table) -> float:
    """Return the share of a packed table that is not padding; 1.0 for an empty table."""
    room = len(table) * table.schema.field("tokens").type.list_size
    return float(table["length"].to_numpy().sum()) / room if room else 1.0


def _check(ids: Sequence[str] | pa.Array, tokens: np.ndarray, offsets: np.ndarray, sequence_length: int,
           token_dtype: str, pad_id: int, window: int) -> None:
    if token_dtype not in ("uint16", "uint32"):
        raise ValueError(f"token_dtype must be uint16 or uint32, got {token_dtype!r}")
    if sequence_length < 1 or window < 1:
        raise ValueError(f"sequence_length and window must be at least 1, got {sequence_length} and {window}")
    if len(offsets) != len(ids) + 1 or offsets[0] != 0 or offsets[-1] != len(tokens) or np.any(np.diff(offsets) < 0):
        raise ValueError(f"offsets must rise from 0 to {len(tokens)} over {len(ids)} documents")
    largest = max(int(tokens.max(initial=0)), pad_id)
    if largest > np.iinfo(token_dtype).max or int(tokens.min(initial=0)) < 0 or pad_id < 0:
        raise ValueError(f"token ids up to {largest} do not fit {token_dtype}")


def _pieces(offsets: np.ndarray, sequence_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (document, token offset in the document, length) of each piece, in document order."""
    sizes = np.diff(offsets)
    counts = -(-sizes // sequence_length)
    documents = np.repeat(np.arange(len(sizes)), counts)
    first = np.cumsum(counts) - counts
    begins = (np.arange(len(documents)) - first[documents]) * sequence_length
    return documents, begins, np.minimum(sizes[documents] - begins, sequence_length)


def _cut(offsets: np.ndarray, sequence_length: int
         ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Return (document, token offset in it, length, row) of each piece, and the number of rows, of the cut stream."""
    total = int(offsets[-1])
    count = -(-total // sequence_length)
    starts = np.union1d(offsets[:-1], np.arange(count) * sequence_length)
    starts = starts[starts < total]  # an empty document begins where the next one does, or at the end
    documents = np.searchsorted(offsets, starts, side="right") - 1
    lengths = np.diff(starts, append=total)
    return documents, starts - offsets[documents], lengths, starts // sequence_length, count


def _place(lengths: np.ndarray, sequence_length: int, window: int) -> tuple[np.ndarray, int]:
    """Return (row of each piece, number of rows)."""
    rows = np.empty(len(lengths), np.int64)
    heads = np.full(sequence_length + 1, -1, np.int64)  # newest row with exactly this room, by room
    chain = np.empty(len(lengths), np.int64)  # next row with the same room
    bits = np.zeros(sequence_length // 64 + 1, np.uint64)
    summary = np.zeros(len(bits) // 64 + 1, np.uint64)
    count = 0
    for first in range(0, len(lengths), window):
        part = lengths[first : first + window]
        longest_first = np.argsort(-part, kind="stable") + first
        count = _best_fit(lengths, longest_first, sequence_length, heads, chain, bits, summary, rows, count)
    return rows, count


def _by_first_document(rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (order of the pieces, their new rows): rows by their first piece, pieces of a row in given order."""
    first_piece = np.full(count, len(rows), np.int64)
    np.minimum.at(first_piece, rows, np.arange(len(rows)))
    rank = np.empty(count, np.int64)
    rank[np.argsort(first_piece)] = np.arange(count)
    renumbered = rank[rows]
    order = np.argsort(renumbered, kind="stable")
    return order, renumbered[order]


@intrinsic
def _lowest_bit(context: Any, value: Any) -> Any:
    """Return the index of the lowest set bit of a nonzero uint64 (LLVM's cttz), int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@compiled
def _best_fit(lengths, order, capacity, heads, chain, bits, summary, rows, count):
    one, low = np.uint64(1), np.uint64(63)
    for piece in order:
        length = lengths[piece]
        # find the smallest room >= length in the words of the bitset and of its summary
        word = length >> 6
        rooms = bits[word] & (~np.uint64(0) << (np.uint64(length) & low))
        if rooms == 0:
            block = (word + 1) >> 6
            full = np.uint64(0)
            if block < len(summary):
                full = summary[block] & (~np.uint64(0) << (np.uint64(word + 1) & low))
                while full == 0 and block + 1 < len(summary):
                    block += 1
                    full = summary[block]
            if full != 0:
                word = (block << 6) + _lowest_bit(full)  # type: ignore[call-arg]
                rooms = bits[word]
        if rooms == 0:
            row = count
            count += 1
            room = capacity
        else:
            room = (word << 6) + _lowest_bit(rooms)  # type: ignore[call-arg]
            row = heads[room]
            heads[room] = chain[row]
            if chain[row] < 0:
                bits[word] &= ~(one << (np.uint64(room) & low))
                if bits[word] == 0:
                    summary[word >> 6] &= ~(one << (np.uint64(word) & low))
        rows[piece] = row
        room -= length
        if room > 0:
            chain[row] = heads[room]
            heads[room] = row
            bits[room >> 6] |= one << (np.uint64(room) & low)
            summary[room >> 12] |= one << (np.uint64(room >> 6) & low)
    return count


@compiled
def _fill(tokens, sources, lengths, rows, sequence_length, matrix, columns, used):
    """Copy each piece after the content of its row; columns [pieces], used [rows]."""
    for piece in range(len(rows)):
        row = rows[piece]
        columns[piece] = used[row]
        target = row * sequence_length + used[row]
        for i in range(lengths[piece]):
            matrix[target + i] = tokens[sources[piece] + i]
        used[row] += lengths[piece]
