"""One pass over a text column for everything that looks at single documents: filters, hashes and signatures.

The pass splits documents into tokens, words and lines once, and all measures share the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from tidewheel.data import text
from tidewheel.data.dedup import minhash as mh
from tidewheel.data.text import (
    hashing,
    kept_line_kernels,
    kernel_tools,
    line_kernels,
    token_kernels,
    token_table,
    unicode_table,
)
from tidewheel.data.text import textpass_kernels as kernels
from tidewheel.data.text.measures import LINE_COUNTS, REPETITION, TOKEN_COUNTS, LineRules, LineShape, Measures, phrases

CHUNK_BYTES = 1 << 19
"""Bytes of text scanned in one kernel call."""
MinHashSettings: TypeAlias = "tuple[int, int, int]"
_STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")


@dataclass(frozen=True)
class Scan:
    """Result of `textpass_kernels.scan` for documents [first, last); the next scan reuses the arrays."""

    first: int
    last: int
    text: np.ndarray
    text_offsets: np.ndarray
    keys: np.ndarray
    places: np.ndarray
    token_offsets: np.ndarray
    words: np.ndarray
    word_offsets: np.ndarray
    normalised: np.ndarray
    normalised_offsets: np.ndarray
    lines: np.ndarray
    line_offsets: np.ndarray
    counts: np.ndarray


def scan(texts: text.Texts, *, words: bool = True) -> Iterator[Scan]:
    """Yield tokens, lines and (with `words`) normalised words of the documents, in chunks of bounded memory."""
    yield from _scan(*text.buffers(texts), True, words)


def _scan(data: np.ndarray, offsets: np.ndarray, tokens: bool, words: bool, limit: int = 0) -> Iterator[Scan]:
    tables = (unicode_table.load()[0], _blob(), token_table.load(), *_tables())
    parts = list(text.chunks(offsets, limit or CHUNK_BYTES))
    size = max((int(offsets[last] - offsets[first]) for first, last in parts), default=0)
    count = max((last - first for first, last in parts), default=0)
    copy = np.empty(size + (count + 1) * kernels.PADDING, np.uint8)
    scratch = np.empty(4 * (int(np.diff(offsets).max(initial=0)) + 8), np.int64)
    keys, places = np.empty(size + 8, np.uint64), np.empty(size + count + 8, np.int32)
    word_hashes = np.empty((size // 2 + count + 8) if words else 0, np.uint64)
    out = np.empty((3 * size + 64) if words else 0, np.uint8)
    most_lines = max((int(np.count_nonzero(data[offsets[first] : offsets[last]] == 10)) + last - first
                      for first, last in parts), default=0)
    lines = np.empty((most_lines + 1, kernels.LINE), np.int32)
    for first, last in parts:
        n = last - first
        text_offsets = np.empty(n, np.int64)
        token_offsets, word_offsets, out_offsets, line_offsets = (np.empty(n + 1, np.int64) for _ in range(4))
        counts = np.empty((n, kernels.COUNTS), np.int64)
        columns = (copy, text_offsets, keys, places, token_offsets, word_hashes, word_offsets, out, out_offsets,
                   lines, line_offsets, counts)
        kernels.scan(data, offsets, first, last, *tables, tokens, words, scratch, *columns)  # type: ignore[call-arg]
        yield Scan(first, last, *columns)


@lru_cache(maxsize=1)
def _blob() -> np.ndarray:
    """Return the folded forms of `unicode_table`, padded so that eight bytes can be loaded anywhere."""
    return text.frozen(np.concatenate([unicode_table.load()[1], np.zeros(8, np.uint8)]))


@lru_cache(maxsize=1)
def _tables() -> tuple[np.ndarray, ...]:
    """Return (ascii_kinds, stop_keys, special_words) for `textpass_kernels.scan`."""
    kinds = np.zeros(256, np.uint8)
    for character in map(chr, range(128)):
        if character.isspace():
            kinds[ord(character)] = kernels.GAP
        elif character in ".,;:!?)\"":
            kinds[ord(character)] = kernels.EDGE
    stop_keys = np.zeros(16, np.uint64)
    for word in _STOP_WORDS:
        stop_keys[_product(_bytes_key(word), kernels.STOP_WORD_MULTIPLIER) >> 60] = _bytes_key(word)
    assert np.count_nonzero(stop_keys) == len(_STOP_WORDS), "two stop words in one slot"
    specials = token_table.special_words()
    slots = token_kernels.SPECIAL_SLOTS
    special_filter, special_keys = np.zeros(token_kernels.SPECIAL_FILTER, np.uint64), np.zeros(slots, np.uint64)
    special_cuts = np.zeros(slots, np.int64)
    for chunk in sorted(specials, key=lambda chunk: (len(chunk.encode()), chunk)):
        if len(chunk.encode()) > token_kernels.SPECIAL_BYTES:
            continue
        key = _bytes_key(chunk)
        slot = _product(key) >> 52
        special_filter[_product(key) >> 54] |= np.uint64(1 << (_product(key) >> 48 & 63))
        while special_keys[slot] != 0:
            slot = (slot + 1) % slots
        special_keys[slot] = key
        cuts = [len(token.encode()) for token in specials[chunk][:-1]]
        special_cuts[slot] = sum(cut << 4 * place for place, cut in enumerate(cuts))
    units = [_bytes_key(unit) for unit in token_table.UNITS]
    special_words = np.concatenate([special_filter, special_keys, special_cuts.astype(np.uint64),
                                    np.array([len(units), *units], np.uint64)])
    return tuple(text.frozen(table) for table in (kinds, stop_keys, special_words))


def _product(key: int, multiplier: int = int(kernel_tools.MULTIPLIER)) -> int:
    return key * multiplier & (1 << 64) - 1


def _bytes_key(word: str) -> int:
    """Return `kernel_tools.key_of` of a word."""
    raw = word.encode()
    if len(raw) <= 8:
        return int.from_bytes(raw, "little")
    padded = np.frombuffer(raw + bytes(16), np.uint8)
    return int(kernel_tools.hash_at(padded.ctypes.data, 0, len(raw)))


@dataclass(frozen=True)
class Measured:
    """Measures of n documents; None for measures that were not requested.

    Args:
        tokens: number of tokens, int64 [n]; zeros if only hashes or signatures are requested.
        token_counts: int64 [n, 10], columns `measures.TOKEN_COUNTS`.
        repetition: int64 [n, 16], columns `measures.REPETITION`.
        line_counts: int64 [n, 6], columns `measures.LINE_COUNTS`.
        kept_lines: int64 [n, 4]: lines with words, lines that stay, sentences in these, number of the reason.
        edited: the texts without the lines that do not stay.
        hashes: uint64 [n, 2], from `hashing.text_hashes`.
        signatures: uint32 [n, k], from `minhash.minhash`.
        shingles: int32 [n], from `minhash.minhash`.
    """

    tokens: np.ndarray
    token_counts: np.ndarray | None = None
    repetition: np.ndarray | None = None
    line_counts: np.ndarray | None = None
    kept_lines: np.ndarray | None = None
    edited: pa.LargeStringArray | None = None
    hashes: np.ndarray | None = None
    signatures: np.ndarray | None = None
    shingles: np.ndarray | None = None


def measure(texts: text.Texts, asked: Measures | None = None, *, minhash: MinHashSettings | None = None,
            hashes: bool = False) -> Measured:
    """Measure documents in one pass over the texts.

    Args:
        texts: the documents.
        asked: counts and edits to make; if nothing at all is requested, only the number of tokens is counted.
        minhash: (words in a shingle, permutations, seed) of signatures; None for no signatures.
        hashes: whether to hash the texts.
    """
    asked = asked or Measures()
    rules = asked.kept_lines
    data, offsets = text.buffers(texts)
    n = len(offsets) - 1
    measured = Measured(
        np.zeros(n, np.int64),
        np.zeros((n, len(TOKEN_COUNTS)), np.int64) if asked.token_counts else None,
        np.zeros((n, len(REPETITION)), np.int64) if asked.repetition else None,
        np.zeros((n, len(LINE_COUNTS)), np.int64) if asked.line_counts else None,
        np.zeros((n, kept_line_kernels.COUNTS), np.int64) if rules else None,
        None,
        np.empty((n, 2), np.uint64) if hashes else None,
        np.full((n, minhash[1]), 0xFFFFFFFF, np.uint32) if minhash else None,
        np.zeros(n, np.int32) if minhash else None,
    )
    edits: list[pa.Array] = []
    tables = _Tables()
    wants_words = hashes or minhash is not None
    wants_tokens = bool(asked.asked()) or not wants_words
    for part in _scan(data, offsets, wants_tokens, wants_words):
        rows = slice(part.first, part.last)
        measured.tokens[rows] = part.counts[:, kernels.TOKENS]
        if measured.token_counts is not None:
            _token_counts(part, measured.token_counts[rows])
        if measured.repetition is not None or measured.line_counts is not None:
            _lines(part, measured.repetition, measured.line_counts, asked.line_counts, tables)
        if rules is not None and measured.kept_lines is not None:
            edits.append(_kept_lines(part, data, offsets, rules, measured.kept_lines[rows]))
        if measured.hashes is not None:
            measured.hashes[rows] = hashing.of_normalised(part.normalised, part.normalised_offsets, data,
                                                      offsets[part.first :])
        if minhash is not None and measured.signatures is not None and measured.shingles is not None:
            mh.sign(part.words, part.word_offsets, minhash[0], mh.permutations(*minhash[1:]), measured.signatures[rows],
                    measured.shingles[rows])
    if rules is None:
        return measured
    return replace(measured, edited=pa.concat_arrays(edits) if edits else pa.array([], pa.large_string()))


def again(before: Measured, texts: pa.Array, rows: np.ndarray, asked: Measures) -> Measured:
    """Measure texts again after some have changed; only these are read.

    Args:
        before: measures before the change.
        texts: the texts after the change.
        rows: indices of the changed texts, int64 [m].
        asked: requested measures. If `before` lacks one, or if lines are to be cut, all texts are read.
    """
    names = list(asked.asked())
    if any(getattr(before, name) is None for name in names) or asked.kept_lines is not None:
        return measure(texts, asked)
    fresh = measure(texts.take(pa.array(rows)), asked)
    merged = {"tokens": before.tokens.copy()}
    merged["tokens"][rows] = fresh.tokens
    for name in names:
        values = getattr(before, name).copy()
        values[rows] = getattr(fresh, name)
        merged[name] = values
    return Measured(**merged)


class _Tables:
    """Hash tables of `line_kernels`, reused from batch to batch: entries of earlier epochs count as free."""

    def __init__(self) -> None:
        self.epoch = 0
        self._tables = [np.zeros(0, np.uint8) for _ in range(3)]

    def of(self, number: int, keys: int) -> np.ndarray:
        """Return table `number`, with room for that many keys."""
        size = line_kernels.table_bytes(keys)
        if len(self._tables[number]) < size:
            self._tables[number] = np.zeros(size, np.uint8)
        return self._tables[number]


def _token_counts(part: Scan, counts: np.ndarray) -> None:
    """Fill the columns `TOKEN_COUNTS`."""
    scanned = part.counts
    counts[:, :7] = scanned[:, [kernels.TOKENS, kernels.SYMBOLS, kernels.WORD_CHARACTERS, kernels.ALPHABETIC,
                                kernels.STOP_WORDS, kernels.HASHES, kernels.ELLIPSES]]
    line_kernels.bullet_counts(part.text, part.lines, part.line_offsets, scanned[:, kernels.BYTES], counts[:, 7:])


def _lines(part: Scan, repetition: np.ndarray | None, line_counts: np.ndarray | None, shape: LineShape | None,
           tables: _Tables) -> None:
    """Fill the columns `REPETITION` and `LINE_COUNTS`."""
    count = int(part.line_offsets[-1])
    line_hashes = np.empty(count, np.uint64)
    line_kernels.line_hashes(part.text, part.lines, count, line_hashes)
    most_lines = int(np.diff(part.line_offsets).max())
    if line_counts is not None and shape is not None:
        table = tables.of(0, most_lines)
        line_kernels.line_counts(part.text, part.text_offsets, part.lines, part.line_offsets, line_hashes, part.counts,
                                 table, tables.epoch, _marks(shape.terminal_punctuation), shape.short_line,
                                 line_counts[part.first : part.last])
        tables.epoch += part.last - part.first
    if repetition is not None:
        most_tokens = int(np.diff(part.token_offsets).max())
        tables.epoch = line_kernels.repetition_counts(
            part.text, part.keys, part.places, part.token_offsets, part.lines, part.line_offsets, line_hashes,
            part.counts, tables.of(0, most_lines), tables.of(1, most_lines), tables.of(2, most_tokens), tables.epoch,
            repetition[part.first : part.last])


@lru_cache(maxsize=4)
def _marks(characters: str) -> np.ndarray:
    """Return a table over all code points, uint8 [0x110000]: 1 for these characters."""
    table = np.zeros(unicode_table.CODE_POINTS, np.uint8)
    table[[ord(character) for character in characters]] = 1
    return text.frozen(table)


def _kept_lines(part: Scan, data: np.ndarray, offsets: np.ndarray, rules: LineRules, counts: np.ndarray) -> pa.Array:
    """Fill the counts, and return the texts without the lines that do not stay."""
    lines = int(part.line_offsets[-1])
    size = int(offsets[part.last] - offsets[part.first])
    cited, keep = np.full(lines, -1, np.int32), np.empty(lines, np.uint8)
    other = part
    if rules.remove_citations:
        numbers, out, out_offsets = np.empty(lines, np.int32), np.empty(size, np.uint8), np.empty(lines + 1, np.int64)
        count = kept_line_kernels.cited_lines(part.text, part.lines, lines, numbers, out, out_offsets)
        if count:
            cited[numbers[:count]] = np.arange(count)
            bare = text.frozen(out[: out_offsets[count]]), text.frozen(out_offsets[: count + 1])
            (other,) = _scan(*bare, True, False, limit=size)
    options = np.array([int(getattr(rules, name)) for name in kept_line_kernels.OPTIONS], np.int64)
    kept_line_kernels.judge(part.text, part.lines, part.line_offsets, part.counts, cited, other.text, other.lines,
                     other.line_offsets, other.counts, phrases(), options, keep, counts)
    kept, kept_offsets = np.empty(size + 1, np.uint8), np.empty(len(counts) + 1, np.int64)
    keep_wordless = int(not rules.terminal_punctuation and rules.min_words_per_line <= 0)
    kept_line_kernels.kept_text(data, offsets, part.first, token_table.load(), part.text_offsets, part.counts,
                                part.lines, part.line_offsets, cited, keep, counts, keep_wordless, kept, kept_offsets)
    return pa.LargeStringArray.from_buffers(len(counts), pa.py_buffer(kept_offsets), pa.py_buffer(kept))
