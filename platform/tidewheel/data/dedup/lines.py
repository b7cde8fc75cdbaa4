"""Deduplication of lines and paragraphs: split texts, decide which documents keep a repeated piece, cut out the rest.

Pieces are compared exactly, by 128-bit hashes of the normalised text. CCNet (Wenzek et al. 2020, section 3.1) and Dolma
(Soldaini et al. 2024, with a Bloom filter) remove repeated paragraphs in this way. All functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data.dedup import ORDER, ORDER_COLUMNS
from tidewheel.data.text import Texts, buffers
from tidewheel.data.text.hashing import text_hashes

ROW_SCHEMA = pa.schema([("hash_hi", pa.uint64()), ("hash_lo", pa.uint64()), *ORDER_COLUMNS])
REPEAT_SCHEMA = pa.schema([("id", pa.string()), ("hash_hi", pa.uint64()), ("hash_lo", pa.uint64()),
                           ("survivor", pa.string())])
_NEWLINE = 10


@dataclass(frozen=True)
class Pieces:
    """Pieces of documents; concatenated, they are the documents.

    Args:
        texts: u pieces, each with the line ends after it; views of the documents' bytes.
        offsets: document d has the pieces [offsets[d], offsets[d + 1]), int64 [n + 1].
    """

    texts: pa.LargeStringArray
    offsets: np.ndarray

    @property
    def documents(self) -> np.ndarray:
        """Index of the document of each piece, int64 [u]."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


def split(texts: Texts, unit: str) -> Pieces:
    """Split n documents into lines (`unit` "line") or paragraphs (`unit` "paragraph": lines up to a blank one)."""
    data, offsets = buffers(texts)
    ends = np.flatnonzero(data[offsets[0] : offsets[-1]] == _NEWLINE) + offsets[0] + 1
    bounds = np.sort(np.concatenate([offsets, ends]), kind="stable")  # merges two sorted arrays
    bounds = bounds[np.diff(bounds, prepend=-1) != 0]
    if unit == "paragraph" and len(bounds) > 1:
        blank = pc.equal(pc.binary_length(pc.utf8_trim_whitespace(_strings(data, bounds))), 0).to_numpy(
            zero_copy_only=False)
        begins = np.ones(len(bounds), bool)  # the last bound is an end and stays
        begins[:-1] = ~blank & np.concatenate([[True], blank[:-1]])
        begins[np.searchsorted(bounds, offsets)] = True
        bounds = bounds[begins]
    return Pieces(_strings(data, bounds), np.searchsorted(bounds, offsets))


def _strings(data: np.ndarray, bounds: np.ndarray) -> pa.LargeStringArray:
    return pa.LargeStringArray.from_buffers(len(bounds) - 1, pa.py_buffer(np.ascontiguousarray(bounds, np.int64)),
                                            pa.py_buffer(data))


def hashes(pieces: Pieces, min_characters: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hash of each piece, uint64 [u, 2], and whether the piece counts, bool [u].

    A piece counts if it has at least `min_characters` characters without the white space around it, and a letter or
    digit. The hash of other pieces is 0.
    """
    trimmed = pc.utf8_trim_whitespace(pieces.texts)
    counts = pc.and_(pc.greater_equal(pc.utf8_length(trimmed), min_characters),
                     pc.match_substring_regex(trimmed, r"[\pL\pN]")).to_numpy(zero_copy_only=False)
    piece_hashes = np.zeros((len(pieces.texts), 2), np.uint64)
    piece_hashes[counts] = text_hashes(pieces.texts.filter(pa.array(counts)))
    return piece_hashes, counts


def rows(texts: Texts, order: pa.Table, unit: str, min_characters: int) -> pa.Table:
    """Return the distinct pieces of each document that count (`ROW_SCHEMA`).

    Args:
        texts: n documents.
        order: n rows with `ORDER_COLUMNS`, which rank the documents.
        unit: "line" or "paragraph".
        min_characters: length of the shortest piece that counts.
    """
    pieces = split(texts, unit)
    all_hashes, counts = hashes(pieces, min_characters)
    sorting = np.lexsort((all_hashes[counts, 1], all_hashes[counts, 0], pieces.documents[counts]))
    documents = pieces.documents[counts][sorting]
    piece_hashes = all_hashes[counts][sorting]
    first = np.ones(len(documents), bool)
    first[1:] = (documents[1:] != documents[:-1]) | (piece_hashes[1:] != piece_hashes[:-1]).any(axis=1)
    ranks = order.take(pa.array(documents[first]))
    return pa.table([pa.array(piece_hashes[first, 0]), pa.array(piece_hashes[first, 1]),
                     *(ranks[name] for name, _ in ORDER_COLUMNS)], schema=ROW_SCHEMA)


def repeats(table: pa.Table, *, max_repeats: int, keep: str) -> pa.Table:
    """Return which documents lose which pieces (`REPEAT_SCHEMA`), in any order.

    Args:
        table: rows of one hash partition (`ROW_SCHEMA`).
        max_repeats: documents lose a piece only if more documents than this contain it.
        keep: "first" to let the best `max_repeats` documents keep the piece; `survivor` is then the best of them.
            "none" to remove the piece from all.
    """
    quality = pc.if_else(pc.is_nan(table["quality"]), pa.scalar(None, pa.float32()), table["quality"])
    table = table.set_column(table.schema.get_field_index("quality"), "quality", quality)
    table = table.take(pc.sort_indices(table, sort_keys=[("hash_hi", "ascending"), ("hash_lo", "ascending"), *ORDER]))
    high, low = table["hash_hi"].to_numpy(), table["hash_lo"].to_numpy()
    count = len(table)
    begins = np.flatnonzero(np.concatenate([[True], (high[1:] != high[:-1]) | (low[1:] != low[:-1])])[:count])
    sizes = np.diff(np.concatenate([begins, [count]]))
    head = np.repeat(begins, sizes)
    is_removed = np.repeat(sizes, sizes) > max_repeats
    ids = table["id"].combine_chunks()
    survivors = pa.nulls(count, pa.string())
    if keep == "first":
        is_removed &= np.arange(count) - head >= max_repeats
        survivors = ids.take(pa.array(head))
    mask = pa.array(is_removed)
    return pa.table([ids, table["hash_hi"], table["hash_lo"], survivors], schema=REPEAT_SCHEMA).filter(mask)


@dataclass(frozen=True)
class Cut:
    """Documents after their repeated pieces are cut out.

    Args:
        texts: n texts.
        pieces: number of pieces cut out of each text, int64 [n].
        survivors: id of the document that keeps the first piece cut out of each text; None if there is none.
    """

    texts: pa.LargeStringArray
    pieces: np.ndarray
    survivors: list[str | None]


def cut(documents: pa.Table, repeated: pa.Table, unit: str, min_characters: int) -> Cut:
    """Cut repeated pieces out of documents. Edited texts also lose the line ends at their beginning and end.

    Args:
        documents: columns id and text.
        repeated: pieces to cut out (`REPEAT_SCHEMA`).
        unit: "line" or "paragraph".
        min_characters: length of the shortest piece that counts.
    """
    is_edited = pc.is_in(documents["id"], value_set=repeated["id"].combine_chunks())
    if not pc.all(is_edited, min_count=0).as_py():  # split only the few documents that lose something
        part = cut(documents.filter(is_edited), repeated, unit, min_characters)
        return _expand(documents["text"], np.flatnonzero(is_edited.to_numpy()), part)
    pieces = split(documents["text"], unit)
    piece_hashes, counts = hashes(pieces, min_characters)
    ids = documents["id"].combine_chunks().take(pa.array(pieces.documents[counts]))
    candidates = pa.table({"piece": np.flatnonzero(counts), "id": ids, "hash_hi": piece_hashes[counts, 0],
                           "hash_lo": piece_hashes[counts, 1]})
    matches = candidates.join(repeated, ["id", "hash_hi", "hash_lo"], join_type="inner", use_threads=False)
    matches = matches.sort_by("piece")
    matched_pieces = matches["piece"].to_numpy()
    is_removed = np.zeros(len(pieces.texts), bool)
    is_removed[matched_pieces] = True
    owners = pieces.documents[matched_pieces]
    removed = np.bincount(owners, minlength=len(documents))
    survivors: list[str | None] = [None] * len(documents)
    first = np.flatnonzero(np.diff(owners, prepend=-1))
    for owner, survivor in zip(owners[first].tolist(), matches["survivor"].take(pa.array(first)).to_pylist(),
                               strict=True):
        survivors[owner] = survivor
    return Cut(_join(pieces, is_removed, removed > 0), removed, survivors)


def _expand(texts: pa.ChunkedArray, rows: np.ndarray, part: Cut) -> Cut:
    """Return the result for all documents, given that for `rows`; the other documents stay as they are."""
    order = np.arange(len(texts))
    order[rows] = len(texts) + np.arange(len(rows))
    whole = texts.combine_chunks().cast(pa.large_string())
    pieces = np.zeros(len(texts), np.int64)
    pieces[rows] = part.pieces
    survivors: list[str | None] = [None] * len(texts)
    for row, survivor in zip(rows.tolist(), part.survivors, strict=True):
        survivors[row] = survivor
    return Cut(pa.concat_arrays([whole, part.texts]).take(pa.array(order)), pieces, survivors)


def _join(pieces: Pieces, is_removed: np.ndarray, is_edited: np.ndarray) -> pa.LargeStringArray:
    """Return the documents without their removed pieces."""
    lengths = pc.binary_length(pieces.texts).to_numpy(zero_copy_only=False).astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(np.where(is_removed, 0, lengths))])
    kept = pieces.texts.filter(pa.array(~is_removed))
    data, offsets = buffers(kept)
    texts = _strings(data, ends[pieces.offsets] + offsets[0])
    return pc.if_else(pa.array(is_edited), pc.utf8_trim(texts, "\r\n"), texts)
