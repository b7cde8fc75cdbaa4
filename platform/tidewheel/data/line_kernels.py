"""Compiled passes over documents as lines, paragraphs and n-grams, for `repetition` and `fineweb`.

They work on a clean copy of the document: without dropped characters (see `unicode_table`), and with
"\\r\\n" as "\\n". As in `kernels`, tables are arguments, and functions call only functions of this file
(numba's cache does not notice a change in another one), hence the second `_decode`.
Two strings count as equal when their 64-bit hashes are.
"""

from __future__ import annotations

import numba
import numpy as np

from tidewheel.data.unicode_table import CLASS_BITS, DIGIT, DROPPED, LETTER, MARK, SEPARATOR, SOLO, SPACE, UPPER

_SEED = np.uint64(0x8F1BBCDCCA62C1D6)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_FMIX_1, _FMIX_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_S32, _S33, _S8, _S0 = np.uint64(32), np.uint64(33), np.uint64(8), np.uint64(0)
_NEWLINE, _RETURN = 10, 13


@numba.njit(nogil=True)
def _decode(data, i, end):
    """(code point, bytes) of the UTF-8 character at i; a broken one is code point 0, one byte."""
    b = np.int64(data[i])
    if b < 0x80:
        return b, 1
    if b < 0xE0:
        if b >= 0xC2 and i + 1 < end:
            return (b & 0x1F) << 6 | (np.int64(data[i + 1]) & 0x3F), 2
    elif b < 0xF0:
        if i + 2 < end:
            return (b & 0x0F) << 12 | (np.int64(data[i + 1]) & 0x3F) << 6 | (np.int64(data[i + 2]) & 0x3F), 3
    elif b < 0xF5 and i + 3 < end:
        code = ((b & 0x07) << 18 | (np.int64(data[i + 1]) & 0x3F) << 12 | (np.int64(data[i + 2]) & 0x3F) << 6
                | (np.int64(data[i + 3]) & 0x3F))
        if code < 0x110000:
            return code, 4
    return np.int64(0), 1


@numba.njit(nogil=True)
def _last(data, start, end):
    """(code point, where it begins) of the character that ends at `end`."""
    i = end - 1
    while i > start and np.int64(data[i]) & 0xC0 == 0x80:
        i -= 1
    return _decode(data, i, end)[0], i


@numba.njit(nogil=True)
def _clean(data, i, end, entries, out):
    """Copy a document into out as described above; (bytes, characters) of the copy."""
    o = characters = 0
    while i < end:
        if data[i] < 0x80:
            if data[i] == _NEWLINE and o > 0 and out[o - 1] == _RETURN:
                o -= 1
                characters -= 1
            out[o] = data[i]
            o += 1
            characters += 1
            i += 1
            continue
        code, size = _decode(data, i, end)
        if np.int64(entries[code]) & CLASS_BITS != DROPPED:
            for j in range(size):
                out[o + j] = data[i + j]
            o += size
            characters += 1
        i += size
    return o, characters


@numba.njit(nogil=True)
def _hash(data, start, end):
    """64-bit hash of bytes [start, end)."""
    h, chunk, shift = _SEED, _S0, _S0
    for i in range(start, end):
        chunk |= np.uint64(data[i]) << shift
        shift += _S8
        if (i - start) & 7 == 7:
            h = (h ^ chunk) * _MULTIPLIER
            h ^= h >> _S32
            chunk, shift = _S0, _S0
    h = (h ^ chunk) * _MULTIPLIER
    h = (h ^ (h >> _S32)) ^ np.uint64(end - start)
    h = (h ^ (h >> _S33)) * _FMIX_1
    h = (h ^ (h >> _S33)) * _FMIX_2
    return h ^ (h >> _S33)


@numba.njit(nogil=True)
def _slot(keys, stamps, epoch, shift, key):
    """Where the key is, or is to go, in the open-addressed table of this epoch (stamps[slot] != epoch: free)."""
    mask = (np.int64(1) << (64 - shift)) - 1
    slot = np.int64((key * _MULTIPLIER) >> np.uint64(shift))
    while stamps[slot] == epoch and keys[slot] != key:
        slot = (slot + 1) & mask
    return slot


@numba.njit(nogil=True)
def _shift(count):
    """Shift for `_slot` that makes a table of at least twice `count` slots."""
    shift = 60
    while (np.int64(1) << (64 - shift)) < 2 * count:
        shift -= 1
    return shift


@numba.njit(nogil=True)
def _characters(data, start, end):
    count = 0
    for i in range(start, end):
        count += np.int64(data[i]) & 0xC0 != 0x80
    return count


@numba.njit(nogil=True)
def _duplicates(data, start, end, newlines, keys, stamps, epoch, shift):
    """(parts, duplicates, characters of duplicates) of the text cut at runs of at least `newlines` newlines.

    A duplicate is a part equal to an earlier one. The text neither begins nor ends with a newline.
    """
    parts = duplicates = characters = 0
    first = start
    while first < end:
        stop, i = first, first
        while stop < end:
            while stop < end and data[stop] != _NEWLINE:
                stop += 1
            i = stop
            while i < end and data[i] == _NEWLINE:
                i += 1
            if i - stop >= newlines:
                break
            stop = i
        parts += 1
        key = _hash(data, first, stop)
        slot = _slot(keys, stamps, epoch, shift, key)
        if stamps[slot] == epoch:
            duplicates += 1
            characters += _characters(data, first, stop)
        else:
            stamps[slot], keys[slot] = epoch, key
        first = i
    return parts, duplicates, characters


@numba.njit(nogil=True)
def _tokens(data, end, entries, ascii_letters, hashes, places):
    """Tokens of a clean text (the rule of `quality`): fills hashes, and places [tokens + 1], the sum of the
    characters of the tokens before. Returns their number."""
    count, i, characters = 0, 0, 0
    state, symbol, start = 0, np.int64(-1), 0  # as in kernels.gopher_counts
    previous_kind = np.int64(SEPARATOR)
    places[0] = 0
    while i < end:
        if state == 1 and ascii_letters[data[i]] != 0:
            previous_kind = np.int64(LETTER)
            characters += 1
            i += 1
            continue
        code, size = _decode(data, i, end)
        entry = np.int64(entries[code])
        kind = entry & CLASS_BITS
        joins = clitic = False
        if kind == SEPARATOR and state == 1 and (
                code == 0x5F or code == 0x2E or code == 0x2C or code == 0x3A or code == 0x27 or code == 0x2019):
            following = np.int64(SEPARATOR)
            if i + size < end:
                following = np.int64(entries[_decode(data, i + size, end)[0]])
            next_kind = following & CLASS_BITS
            wordlike = next_kind == LETTER or next_kind == DIGIT or next_kind == MARK
            if code == 0x5F:
                joins = wordlike
            elif code == 0x2E:
                joins = wordlike and following & UPPER == 0
            elif code == 0x2C or code == 0x3A:
                joins = next_kind == DIGIT and previous_kind == DIGIT
            else:
                clitic = wordlike
        previous_kind = kind
        if not (joins or (state == 1 and (kind == LETTER or kind == DIGIT or kind == MARK))
                or (state == 2 and kind == MARK) or (state == 3 and code == symbol)):
            if state != 0:
                hashes[count] = _hash(data, start, i)
                count += 1
                places[count] = characters
            start, symbol = i, np.int64(-1)
            if kind == SEPARATOR and not clitic:
                if entry & SPACE != 0:
                    state = 0
                    i += size
                    continue
                state, symbol = 3, code
            else:
                state = 2 if kind == SOLO else 1
        characters += 1
        i += size
    if state != 0:
        hashes[count] = _hash(data, start, end)
        count += 1
        places[count] = characters
    return count


@numba.njit(nogil=True)
def _ngrams(tokens, hashes, places, ids, counts, live, marks, keys, values, stamps, epoch, row):
    """Top 2..4-gram characters into row[0:3], duplicate 5..10-gram characters into row[3:9]; the next epoch.

    `live` lists the places whose n-gram occurs more than once; only where two neighbouring (n-1)-grams
    do, the n-gram can. ids holds the place where the n-gram of a place was first seen.
    """
    shift = _shift(tokens)
    for t in range(tokens):
        slot = _slot(keys, stamps, epoch, shift, hashes[t])
        if stamps[slot] != epoch:
            stamps[slot], keys[slot] = epoch, hashes[t]
            values[slot] = t
            counts[t] = 0
        ids[t] = values[slot]
        counts[ids[t]] += 1
        marks[t] = 0
    size = 0
    for t in range(tokens):
        if counts[ids[t]] > 1:
            live[size] = t
            size += 1
    for n in range(2, 11):
        epoch += 1
        shift = _shift(size)
        candidates = 0
        for j in range(size - 1):
            t = live[j]
            if live[j + 1] != t + 1:
                continue
            key = np.uint64(ids[t]) << _S32 | np.uint64(ids[t + 1])
            slot = _slot(keys, stamps, epoch, shift, key)
            if stamps[slot] != epoch:
                stamps[slot], keys[slot] = epoch, key
                values[slot] = t
                counts[t] = 0
            ids[t] = values[slot]
            counts[ids[t]] += 1
            live[candidates] = t
            candidates += 1
        size = 0
        best, top, skip, repeated = 1, 0, 0, 0
        for j in range(candidates):
            t = live[j]
            first = ids[t]
            if counts[first] < 2:
                continue
            live[size] = t
            size += 1
            if n <= 4:
                if counts[first] > best:
                    best, top = counts[first], first
            elif t >= skip:
                if marks[first] == n:
                    repeated += places[t + n] - places[t]
                    skip = t + n
                else:
                    marks[first] = n
        if n > 4:
            row[n - 2] = repeated
        elif tokens >= n:
            row[n - 2] = best * (places[top + n] - places[top] + n - 1)
    return epoch + 1


@numba.njit(nogil=True, cache=True)
def repetition_counts(data, offsets, first, last, entries, ascii_letters, counts):
    """Counts of documents [first, last) into counts [n, 16] int64 (zeros), columns as `repetition.COUNTS`."""
    longest = np.int64(0)
    for document in range(first, last):
        longest = max(longest, offsets[document + 1] - offsets[document])
    text = np.empty(longest, np.uint8)
    places = np.empty(longest + 1, np.int64)
    ids, occurrences, marks = np.empty(longest, np.int64), np.empty(longest, np.int64), np.empty(longest, np.int64)
    slots = np.int64(1) << (64 - _shift(longest))  # memory that is not touched is not used
    hashes, live = np.empty(longest, np.uint64), np.empty(longest, np.int64)
    keys, values, stamps = np.empty(slots, np.uint64), np.empty(slots, np.int64), np.zeros(slots, np.int32)
    epoch = np.int32(1)
    for document in range(first, last):
        row = counts[document - first]
        end, row[0] = _clean(data, offsets[document], offsets[document + 1], entries, text)
        a, b = np.int64(0), np.int64(end)
        while a < b:
            code, size = _decode(text, a, b)
            if np.int64(entries[code]) & SPACE == 0:
                break
            a += size
        while b > a:
            code, place = _last(text, a, b)
            if np.int64(entries[code]) & SPACE == 0:
                break
            b = place
        newlines = 1
        for i in range(a, b):
            newlines += text[i] == _NEWLINE
        shift = _shift(newlines)
        row[1], row[2], row[3] = _duplicates(text, a, b, 1, keys, stamps, epoch, shift)
        row[4], row[5], row[6] = _duplicates(text, a, b, 2, keys, stamps, epoch + 1, shift)
        tokens = _tokens(text, end, entries, ascii_letters, hashes, places)
        epoch = _ngrams(tokens, hashes, places, ids, occurrences, live, marks, keys, values, stamps,
                        epoch + 2, row[7:16])


@numba.njit(nogil=True, cache=True)
def line_counts(data, offsets, first, last, entries, terminal, short, counts):
    """Counts of documents [first, last) into counts [n, 6] int64 (zeros), columns as `fineweb.COUNTS`.

    terminal: code points of terminal punctuation; short: most characters of a short line.
    """
    longest = np.int64(0)
    for document in range(first, last):
        longest = max(longest, offsets[document + 1] - offsets[document])
    text = np.empty(longest, np.uint8)
    slots = np.int64(1) << (64 - _shift(longest + 1))
    keys, stamps = np.empty(slots, np.uint64), np.zeros(slots, np.int32)
    for document in range(first, last):
        row, epoch = counts[document - first], np.int32(document - first + 1)
        end, characters = _clean(data, offsets[document], offsets[document + 1], entries, text)
        newlines = 0
        for i in range(end):
            newlines += text[i] == _NEWLINE
        shift = _shift(newlines + 1)
        start = 0
        while start < end:
            stop, blank = start, True
            while stop < end and text[stop] != _NEWLINE:
                if blank and np.int64(text[stop]) & 0xC0 != 0x80:
                    blank = np.int64(entries[_decode(text, stop, end)[0]]) & SPACE != 0
                stop += 1
            if not blank:
                length = _characters(text, start, stop)
                row[0] += 1
                code = _last(text, start, stop)[0]
                for mark in terminal:
                    if code == mark:
                        row[1] += 1
                        break
                row[2] += length <= short
                key = _hash(text, start, stop)
                slot = _slot(keys, stamps, epoch, shift, key)
                if stamps[slot] == epoch:
                    row[3] += length
                else:
                    stamps[slot], keys[slot] = epoch, key
            start = stop + 1
        row[4], row[5] = characters - newlines, newlines
