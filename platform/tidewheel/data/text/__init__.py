"""Words and normalised text: the frozen definition that all hashes of a pipeline use.

Definition `TEXT_VERSION`, per code point of Unicode 14 (later additions count as unassigned):

- folding: NFD, lower case, diacritics and vowel points dropped (combining marks of the general, Hebrew
  and Arabic blocks), final sigma as sigma; format characters (soft hyphen, joiners, BOM) dropped.
  No rule looks at neighbouring characters, so NFC and NFD texts agree, Hangul and kana included;
- punctuation, symbols, controls, unassigned code points and white space separate words;
- a run of decimal digits of any script becomes "0" (with `keep_digits`: ASCII digits, one for one);
- ideographs, kana (hiragana) and the letters of Thai, Lao, Khmer and Myanmar, written without spaces,
  are words of their own, together with the marks that follow them;
- words are joined by one space. A text without words becomes the empty string.

`unicode_table` has the classes, `kernels.scan_words` the compiled pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from tidewheel.versions import Version

TEXT_VERSION = "text-1"
VERSION = Version("text")
"""Version of how text is normalised and split into words."""
CHUNK_BYTES = 1 << 20
"""Bytes of text scanned in one kernel call, so that the scratch memory stays in the processor's cache."""

Texts: TypeAlias = "pa.Array | pa.ChunkedArray | Sequence[str]"


@dataclass(frozen=True)
class Words:
    """Words of n consecutive documents.

    Args:
        hashes: 64-bit hash of each normalised word, uint64 [w].
        offsets: document d has the words [offsets[d], offsets[d + 1]), int64 [n + 1].
        starts: first byte of each word in the document's UTF-8 bytes, int64 [w].
        ends: byte after each word, int64 [w].
    """

    hashes: np.ndarray
    offsets: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


def buffers(texts: Texts) -> tuple[np.ndarray, np.ndarray]:
    """Return (data uint8, offsets int64 [n + 1]) of a string column, read-only and without a copy; nulls are empty.

    Raises:
        TypeError: `texts` is an Arrow array of another type than strings.
    """
    array = texts if isinstance(texts, pa.Array | pa.ChunkedArray) else pa.array(texts, pa.large_string())
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks == 1 else pa.concat_arrays(
            [chunk.cast(pa.large_string()) for chunk in array.chunks] or [pa.array([], pa.large_string())])
    if not (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
        raise TypeError(f"expected a string column, got {array.type}")
    array = array.cast(pa.large_string())
    if array.null_count:
        array = array.fill_null("")
    _, offset_buffer, data_buffer = array.buffers()
    if len(array) == 0 or offset_buffer is None:
        offsets = np.zeros(1, np.int64)
    else:
        offsets = np.frombuffer(offset_buffer, np.int64)[array.offset : array.offset + len(array) + 1]
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None and data_buffer.size else np.zeros(0, "u1")
    return frozen(data), frozen(offsets)


def frozen(array: np.ndarray) -> np.ndarray:
    """Return a read-only view. numba compiles separate code for writable arrays, so all inputs are read-only."""
    view = array.view()
    view.flags.writeable = False
    return view


def chunks(offsets: np.ndarray, limit: int = CHUNK_BYTES) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, last) of documents of about `limit` bytes, with at least one document."""
    first = 0
    count = len(offsets) - 1
    while first < count:
        last = int(np.searchsorted(offsets, offsets[first] + limit, side="right")) - 1
        last = min(max(last, first + 1), count)
        yield first, last
        first = last


def scan(texts: Texts, *, keep_digits: bool = False) -> Iterator[tuple[int, int, Words]]:
    """Yield (first, last, words) for chunks of documents, in bounded memory."""
    for first, last, words, _, _ in _scan(texts, keep_digits):
        yield first, last, words


def words(texts: Texts, *, keep_digits: bool = False) -> Words:
    """Return the words of all documents."""
    parts = [part for _, _, part in scan(texts, keep_digits=keep_digits)]
    offsets = [np.zeros(1, np.int64)]
    for part in parts:
        offsets.append(part.offsets[1:] + offsets[-1][-1])
    return Words(
        np.concatenate([part.hashes for part in parts] or [np.zeros(0, np.uint64)]),
        np.concatenate(offsets),
        np.concatenate([part.starts for part in parts] or [np.zeros(0, np.int64)]),
        np.concatenate([part.ends for part in parts] or [np.zeros(0, np.int64)]),
    )


def normalised_chunks(texts: Texts, *, keep_digits: bool = False) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """Yield (first, last, bytes uint8, offsets int64 [last - first + 1]) of normalised text; arrays are reused."""
    for first, last, _, data, offsets in _scan(texts, keep_digits):
        yield first, last, data, offsets


def normalise(texts: Texts, *, keep_digits: bool = False) -> pa.LargeStringArray:
    """Return the normalised text of each document."""
    parts = []
    for first, last, data, offsets in normalised_chunks(texts, keep_digits=keep_digits):
        parts.append(pa.LargeStringArray.from_buffers(last - first, pa.py_buffer(offsets.tobytes()),
                                                      pa.py_buffer(data[: offsets[-1]].tobytes())))
    return pa.concat_arrays(parts) if parts else pa.array([], pa.large_string())


def _scan(texts: Texts, keep_digits: bool) -> Iterator[tuple[int, int, Words, np.ndarray, np.ndarray]]:
    data, offsets = buffers(texts)
    from tidewheel.data.text import kernels, unicode_table  # imports numba, which is slow

    entries, blob = unicode_table.load()
    letters = ascii_letters()
    out = np.empty(0, np.uint8)
    for first, last in chunks(offsets):
        size = int(offsets[last] - offsets[first])
        count = last - first
        if len(out) < 3 * size:  # folding turns a byte into at most 3 (Hangul), as the table's test asserts
            out = np.empty(3 * size, np.uint8)
        most = size // 2 + count  # the shortest word has one byte and a separator
        hashes = np.empty(most, np.uint64)
        starts = np.empty(most, np.int64)
        ends = np.empty(most, np.int64)
        out_offsets = np.empty(count + 1, np.int64)
        word_offsets = np.empty(count + 1, np.int64)
        kernels.scan_words(data, offsets, first, last, entries, blob, letters, keep_digits,
                           out, out_offsets, hashes, starts, ends, word_offsets)
        total = int(word_offsets[-1])
        yield first, last, Words(hashes[:total], word_offsets, starts[:total], ends[:total]), out, out_offsets


@lru_cache(maxsize=1)
def ascii_letters() -> np.ndarray:
    """Return the lower-case letter of each ASCII letter, uint8 [256]; 0 for every other byte."""
    table = np.zeros(256, np.uint8)
    for byte in range(128):
        if chr(byte).isalpha():
            table[byte] = ord(chr(byte).lower())
    return frozen(table)
