"""The compiled pass of `refinedweb`, which reads each line once and copies the lines that stay.

As in `kernels`, tables are arguments.
"""

from __future__ import annotations

import numba
import numpy as np

from tidewheel.data.text.kernel_tools import compiled, decode
from tidewheel.data.text.unicode_table import CLASS_BITS, DIGIT, LETTER, SOLO, SPACE, UPPER

UPPER_FLAG, DIGIT_FLAG, SPACE_FLAG = 1, 2, 4
_NEWLINE = 10


@numba.njit(nogil=True)
def _decode(data, i, end):
    return decode(np.int64(data.ctypes.data), i, end)


@numba.njit(nogil=True)
def _flags(entry):
    """Return the flags of a character that is not ASCII, from its table entry."""
    kind = entry & CLASS_BITS
    return ((UPPER_FLAG if entry & UPPER != 0 else 0) | (DIGIT_FLAG if kind == DIGIT else 0)
            | (SPACE_FLAG if entry & SPACE != 0 else 0))


@numba.njit(nogil=True)
def _count(data, i, end, entries, ascii_flags):
    """Return (characters, upper-case ones, digits, words, end) of the line at i, which ends at a newline or `end`."""
    characters, words = 0, 0
    upper, digits = np.int64(0), np.int64(0)
    in_word = False
    while i < end:
        if data[i] < 0x80:
            if data[i] == _NEWLINE:
                break
            flags = np.int64(ascii_flags[data[i]])
            i += 1
        else:
            code, size = _decode(data, i, end)
            flags = np.int64(_flags(np.int64(entries[code])))
            i += size
        characters += 1
        upper += flags & UPPER_FLAG
        digits += (flags & DIGIT_FLAG) >> 1
        space = flags & SPACE_FLAG != 0
        words += not space and not in_word
        in_word = not space
    return characters, upper, digits, words, i


@numba.njit(nogil=True)
def _wordlike(code, entry):
    """Return whether \\w matches the character: a letter, number or underscore."""
    kind = entry & CLASS_BITS
    return kind == LETTER or kind == DIGIT or kind == SOLO or code == 0x5F


@numba.njit(nogil=True)
def _matches(data, i, end, phrase, first, last):
    """Return whether the bytes at i are phrase[first:last], ignoring ASCII case."""
    if end - i < last - first:
        return False
    for j in range(last - first):
        b = data[i + j]
        if 65 <= b <= 90:
            b += np.uint8(32)
        if b != phrase[first + j]:
            return False
    return True


@numba.njit(nogil=True)
def _is_counter(data, i, end, entries, counted, counted_ends):
    """Return whether the line has only a number ("1,204", "3.1K"), one of the words, and punctuation."""
    code, size = np.int64(0), 0
    while i < end:  # skip to the first word character, which must be a digit
        code, size = _decode(data, i, end)
        if _wordlike(code, np.int64(entries[code])):
            break
        i += size
    if i >= end or np.int64(entries[code]) & CLASS_BITS != DIGIT:
        return False
    while i < end:
        code, size = _decode(data, i, end)
        if not (np.int64(entries[code]) & CLASS_BITS == DIGIT or code == 0x2C or code == 0x2E):
            break
        i += size
    if i < end and (data[i] | 32 == 107 or data[i] | 32 == 109 or data[i] | 32 == 98):  # k, m, b
        i += 1
    spaces = 0
    while i < end:
        code, size = _decode(data, i, end)
        if np.int64(entries[code]) & SPACE == 0:
            break
        i += size
        spaces += 1
    if spaces == 0:
        return False
    first = 0
    for last in counted_ends:
        if _matches(data, i, end, counted, first, last):
            i += last - first
            while i < end:
                code, size = _decode(data, i, end)
                if _wordlike(code, np.int64(entries[code])):
                    return False
                i += size
            return True
        first = last
    return False


@numba.njit(nogil=True)
def _cut(out, start, end, first, last):
    """Remove bytes [first, last) from the line [start, end); return its new end."""
    for j in range(last, end):
        out[first + j - last] = out[j]
    return end - (last - first)


@numba.njit(nogil=True)
def _space_before(out, start, i, entries):
    """Return the length in bytes of the white-space character that ends at i; 0 if there is none."""
    j = i - 1
    while j > start and np.int64(out[j]) & 0xC0 == 0x80:
        j -= 1
    if j >= start and np.int64(entries[_decode(out, j, i)[0]]) & SPACE != 0:
        return i - j
    return 0


@numba.njit(nogil=True)
def _cut_phrase(out, start, end, entries, phrases, first, last, position):
    """Remove a phrase, with one adjacent white-space character, from the line; return (new end, number of removals)."""
    times = 0
    if position == 2:
        if _matches(out, start, end, phrases, first, last):
            stop = start + last - first
            if stop < end:
                code, size = _decode(out, stop, end)
                stop += size if np.int64(entries[code]) & SPACE != 0 else 0
            end = _cut(out, start, end, start, stop)
            times = 1
    elif position == 1:
        stop, space = end, _space_before(out, start, end, entries)
        while space > 0:
            stop -= space
            space = _space_before(out, start, stop, entries)
        begin = stop - (last - first)
        if begin >= start and _matches(out, begin, stop, phrases, first, last):
            begin -= _space_before(out, start, begin, entries)
            end = _cut(out, start, end, begin, stop)
            times = 1
    else:
        i = start
        while i < end:
            if _matches(out, i, end, phrases, first, last):
                stop = i + last - first
                i -= _space_before(out, start, i, entries)
                end = _cut(out, start, end, i, stop)
                times += 1
            else:
                i += 1
    return end, times


@compiled
def remove_lines(data, offsets, first, last, entries, ascii_flags, max_upper, max_digits, min_words, short_words,
                 counted, counted_ends, phrases, phrase_ends, positions, out, bounds, counts):
    """Write documents [first, last) without removed lines and phrases to out; fill bounds and counts [n, 4]."""
    o = 0
    for document in range(first, last):
        i, stop, begin = offsets[document], offsets[document + 1], o
        row = counts[document - first]
        while i < stop:
            characters, upper, digits, words, end = _count(data, i, stop, entries, ascii_flags)
            newline = end < stop
            row[0] += words
            if words > 0 and (upper / characters > max_upper or digits / characters > max_digits or words < min_words
                              or (digits > 0 and _is_counter(data, i, end, entries, counted, counted_ends))):
                row[2] += 1
                i = end + 1
                continue
            start = o
            for j in range(i, end):
                out[o] = data[j]
                o += 1
            if 0 < words <= short_words:
                cut, begins = 0, 0
                for index in range(len(phrase_ends)):
                    stops = phrase_ends[index]
                    o, times = _cut_phrase(out, start, o, entries, phrases, begins, stops, positions[index])
                    cut += times
                    begins = stops
                if cut > 0:
                    row[3] += cut
                    words = _count(out, start, o, entries, ascii_flags)[3]
                    if words == 0:
                        row[2] += 1
                        o = start
                        i = end + 1
                        continue
            row[1] += words
            if newline:
                out[o] = _NEWLINE
                o += 1
            i = end + 1
        if row[2] + row[3] > 0:
            lead = begin
            while lead < o and out[lead] < 0x80 and ascii_flags[out[lead]] & SPACE_FLAG != 0:
                lead += 1
            while o > lead and out[o - 1] < 0x80 and ascii_flags[out[o - 1]] & SPACE_FLAG != 0:
                o -= 1
            o = _cut(out, begin, o, begin, lead)
        bounds[document - first + 1] = o
