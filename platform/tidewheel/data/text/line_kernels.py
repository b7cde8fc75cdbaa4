"""Compiled passes over lines, paragraphs and n-grams, for `textpass`.

They read the output of `textpass_kernels.scan`, one batch of documents at a time. Two strings count as equal if their
64-bit hashes are equal.
"""

from __future__ import annotations

import numba
import numpy as np

from tidewheel.data.text.kernel_tools import (
    MULTIPLIER,
    SEED,
    absorb,
    compiled,
    hash_bytes,
    load,
    store,
)
from tidewheel.data.text.textpass_kernels import BYTES, CHARACTERS, CHUNKS, FIRST, LAST, LENGTH, START, STOP

_U0, _U32, _LOW32 = np.uint64(0), np.uint64(32), np.uint64(0xFFFFFFFF)

# A table of keys has 16 bytes per slot: the key, then epoch << 32 | value. A slot of another epoch is free. Where the
# value is the index of the key, a table of indices suffices: 8 bytes per slot, so that twice as many fit in the cache.


@numba.njit(nogil=True)
def _slot(table, shift, key, epoch):
    """Return the address of the slot that holds the key, or of the free slot for it."""
    mask = (np.int64(1) << (64 - shift)) - 1
    slot = np.int64((key * MULTIPLIER) >> np.uint64(shift))
    while np.int64(load(table + 16 * slot + 8) >> _U32) == epoch and load(table + 16 * slot) != key:
        slot = (slot + 1) & mask
    return table + 16 * slot


@numba.njit(nogil=True)
def _first(table, shift, key, epoch, value):
    """Return the first value stored for the key in this epoch; store `value` if there is none."""
    slot = _slot(table, shift, key, epoch)
    stamp = load(slot + 8)
    fresh = np.uint64(epoch) << _U32 | np.uint64(value)
    stamp = stamp if np.int64(stamp >> _U32) == epoch else fresh
    store(slot, key)
    store(slot + 8, stamp)
    return np.int64(stamp & np.uint64(0xFFFFFFFF))


@numba.njit(nogil=True)
def _shift(count):
    """Return the shift for `_slot` that gives a table at least twice `count` slots."""
    shift = 60
    while (np.int64(1) << (64 - shift)) < 2 * count:
        shift -= 1
    return shift


def table_bytes(count: int) -> int:
    """Return the size in bytes of a table for `count` keys."""
    return 16 << max(4, int(2 * count - 1).bit_length())


@numba.njit(nogil=True)
def _last_code(text, start, stop):
    """Return the code point that ends at `stop`; 0 if there is none."""
    i = stop - 1
    while i > start and np.int64(text[i]) & 0xC0 == 0x80:
        i -= 1
    if i < start:
        return np.int64(0)
    code = np.int64(text[i])
    if code >= 0x80:
        code &= 0x7F >> min(stop - i, 4)  # the leading byte has one leading 1 for each byte of the character
        for j in range(i + 1, stop):
            code = code << 6 | (np.int64(text[j]) & 0x3F)
    return min(code, 0x10FFFF)


@compiled
def bullet_counts(text, lines, line_offsets, sizes, counts):
    """Count each document's lines, those that start with a bullet and those that end in an ellipsis: int64 [n, 3]."""
    for d in range(len(counts)):
        row = counts[d]
        for line in range(line_offsets[d], line_offsets[d + 1]):
            row[0] += 1
            if lines[line, CHUNKS] == 0:
                continue
            start, stop = np.int64(lines[line, FIRST]), np.int64(lines[line, LAST])
            a, z = text[start], text[stop - 1]
            row[1] += a == 0x2D or (a == 0xE2 and text[start + 1] == 0x80 and text[start + 2] == 0xA2)
            if z == 0x2E:
                row[2] += stop - start >= 3 and text[stop - 2] == 0x2E and text[stop - 3] == 0x2E
            elif z == 0xA6:
                row[2] += stop - start >= 3 and text[stop - 2] == 0x80 and text[stop - 3] == 0xE2
        if sizes[d] == 0:
            row[0] = 0


@compiled
def line_hashes(text, lines, count, hashes):
    """Compute the hash of each line, uint64."""
    at = np.int64(text.ctypes.data)
    for line in range(count):
        hashes[line] = hash_bytes(at, np.int64(lines[line, START]), np.int64(lines[line, STOP]))


@compiled
def line_counts(text, text_offsets, lines, line_offsets, hashes, scanned, table, epoch, terminal, short, counts):
    """Count the lines of documents by kind, into counts [n, 6] int64 (zeros) with columns `measures.LINE_COUNTS`.

    terminal: uint8 [0x110000], 1 for terminal punctuation; short: most characters of a short line; table: uint8, of
    `table_bytes` for the largest number of lines; epoch: the last one used in it. Each document uses one epoch.
    """
    at = np.int64(table.ctypes.data)
    for d in range(len(counts)):
        row = counts[d]
        epoch += 1
        end, newlines = text_offsets[d] + scanned[d, BYTES], 0
        shift = _shift(line_offsets[d + 1] - line_offsets[d])
        for line in range(line_offsets[d], line_offsets[d + 1]):
            start, stop = np.int64(lines[line, START]), np.int64(lines[line, STOP])
            newlines += stop < end
            if lines[line, CHUNKS] == 0:
                continue
            length = np.int64(lines[line, LENGTH])
            row[0] += 1
            row[1] += terminal[_last_code(text, start, stop)]
            row[2] += length <= short
            if _first(at, shift, hashes[line], epoch, line) != line:
                row[3] += length
        row[4], row[5] = scanned[d, CHARACTERS] - newlines, newlines


@numba.njit(nogil=True)
def _duplicates(text_at, lines, first, last, hashes, line_table, paragraph_table, epoch, row):
    """Fill row[1:7] (columns `measures.REPETITION`) from lines [first, last) of a document."""
    while first < last and lines[first, CHUNKS] == 0:  # white space at both ends does not count
        first += 1
    while first < last and lines[last - 1, CHUNKS] == 0:
        last -= 1
    shift = _shift(last - first)
    paragraph, length, begun = SEED, 0, -1
    for line in range(first, last + 1):
        start = stop = characters = np.int64(0)
        key = _U0
        if line < last:
            start, stop = np.int64(lines[line, START]), np.int64(lines[line, STOP])
            characters, key = np.int64(lines[line, LENGTH]), hashes[line]
            if (line == first and lines[line, FIRST] > start) or (line == last - 1 and lines[line, LAST] < stop):
                bare_start = np.int64(lines[line, FIRST]) if line == first else start
                bare_stop = np.int64(lines[line, LAST]) if line == last - 1 else stop
                characters -= _characters(text_at, start, bare_start) + _characters(text_at, bare_stop, stop)
                key = hash_bytes(text_at, bare_start, bare_stop)
        if start == stop:  # an empty line, or the end, ends a paragraph
            if begun >= 0:
                row[4] += 1
                if _first(paragraph_table, shift, paragraph, epoch, begun) != begun:
                    row[5] += 1
                    row[6] += length
            paragraph, length, begun = SEED, 0, -1
            continue
        row[1] += 1
        if _first(line_table, shift, key, epoch, line) != line:
            row[2] += 1
            row[3] += characters
        paragraph = absorb(paragraph, key)
        length += characters + (begun >= 0)
        begun = line if begun < 0 else begun


@numba.njit(nogil=True)
def _characters(at, start, stop):
    """Return the number of characters that begin in bytes [start, stop)."""
    count = 0
    for i in range(start, stop):
        count += load(at + i) & np.uint64(0xC0) != np.uint64(0x80)
    return count


@numba.njit(nogil=True)
def _first_token(table, shift, keys, epoch, t):
    """Return the index of the first token equal to token t. The table is one of indices."""
    key = load(keys + 8 * t)
    last = (np.int64(1) << (64 - shift)) - 1
    slot = np.int64((key * MULTIPLIER) >> np.uint64(shift))
    while True:
        entry = load(table + 8 * slot)
        if np.int64(entry >> _U32) != epoch:
            store(table + 8 * slot, np.uint64(epoch) << _U32 | np.uint64(t))
            return t
        index = np.int64(entry & _LOW32)
        if load(keys + 8 * index) == key:
            return index
        slot = (slot + 1) & last


@numba.njit(nogil=True)
def _first_pair(table, shift, ids, epoch, t):
    """Return the first index with the same pair ids[index], ids[index + 1] (int32) as index t."""
    key = load(ids + 4 * t)
    last = (np.int64(1) << (64 - shift)) - 1
    slot = np.int64((key * MULTIPLIER) >> np.uint64(shift))
    while True:
        entry = load(table + 8 * slot)
        if np.int64(entry >> _U32) != epoch:
            store(table + 8 * slot, np.uint64(epoch) << _U32 | np.uint64(t))
            return t
        index = np.int64(entry & _LOW32)
        if load(ids + 4 * index) == key:
            return index
        slot = (slot + 1) & last


@numba.njit(nogil=True)
def _ngrams(keys, places, tokens, ids, counts, live, marks, table, epoch, row):
    """Fill row[7:10] with top 2..4-gram characters and row[10:16] with duplicate 5..10-gram characters.

    Returns the last epoch used. `live` lists the tokens whose n-gram occurs more than once. An n-gram can repeat only
    if both of its (n-1)-grams do. ids[n % 2] holds for each token the first occurrence of its n-gram; the other row
    holds those of n - 1.
    """
    shift = _shift(tokens)
    own = ids[1]
    for t in range(tokens):
        counts[t] = 0
        first = _first_token(table, shift, keys, epoch, t)
        own[t] = first
        counts[first] += 1
        marks[t] = 0
    size = 0
    for t in range(tokens):
        live[size] = t
        size += counts[own[t]] > 1
    for n in range(2, 11):  # unpredictable branches are written as sums
        candidates = 0
        for j in range(size - 1):
            t = live[j]
            live[candidates] = t
            candidates += live[j + 1] == t + 1
        epoch += 1
        shift = _shift(candidates)
        previous, own = np.int64(own.ctypes.data), ids[n % 2]
        for j in range(candidates):
            t = np.int64(live[j])
            counts[t] = 0
            first = _first_pair(table, shift, previous, epoch, t)
            own[t] = first
            counts[first] += 1
        size = 0
        for j in range(candidates):
            t = live[j]
            live[size] = t
            size += counts[own[t]] > 1
        if n <= 4:
            best, top = np.int64(1), np.int64(0)
            for j in range(size):
                first = np.int64(own[live[j]])
                if counts[first] > best:
                    best, top = np.int64(counts[first]), first
            if tokens >= n:
                row[5 + n] = best * (places[top + n] - places[top] + n - 1)
            continue
        skip, repeated = np.int64(0), np.int64(0)
        for j in range(size):
            t = np.int64(live[j])
            if t >= skip:
                first = np.int64(own[t])
                if marks[first] == n:
                    repeated += places[t + n] - places[t]
                    skip = t + n
                else:
                    marks[first] = n
        row[5 + n] = repeated
    return epoch


@compiled
def repetition_counts(text, keys, places, token_offsets, lines, line_offsets, hashes, scanned, line_table,
                      paragraph_table, token_table, epoch, counts):
    """Count repetition in a batch of documents, into counts [n, 16] int64 (zeros), columns `measures.REPETITION`.

    line_table, paragraph_table, token_table: uint8, of `table_bytes` for the most lines, lines and tokens;
    epoch: the last one used in them. Returns the last epoch used.
    """
    text_at, lines_at, paragraphs_at, tokens_at = (
        np.int64(text.ctypes.data), np.int64(line_table.ctypes.data), np.int64(paragraph_table.ctypes.data),
        np.int64(token_table.ctypes.data))
    keys_at, longest = np.int64(keys.ctypes.data), np.int64(0)
    for d in range(len(counts)):
        longest = max(longest, token_offsets[d + 1] - token_offsets[d])
    ids, occurrences = np.empty((2, longest + 1), np.int32), np.empty(longest, np.int32)
    live, marks = np.empty(longest + 1, np.int32), np.empty(longest, np.int32)
    for d in range(len(counts)):
        row = counts[d]
        epoch += 1
        row[0] = scanned[d, CHARACTERS]
        _duplicates(text_at, lines, line_offsets[d], line_offsets[d + 1], hashes, lines_at, paragraphs_at,
                    epoch, row)
        first, last = token_offsets[d], token_offsets[d + 1]
        epoch = _ngrams(keys_at + 8 * first, places[first + d :], last - first, ids, occurrences, live, marks,
                        tokens_at, epoch + 1, row)
    return epoch
