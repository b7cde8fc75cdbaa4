"""Compiled passes of `measures.LineRules`: citations, the verdict on each line, and the text without removed lines.

They read the output of `textpass_kernels.scan`, one batch of documents at a time.
"""

from __future__ import annotations

import numba
import numpy as np

from tidewheel.data.text.kernel_tools import HIGH, compiled, load, phrase_begins, trailing_zeros
from tidewheel.data.text.textpass_kernels import (
    BRACE,
    BRACKET,
    BYTES,
    CHUNKS,
    FIRST,
    LAST,
    LONGEST,
    MARKS,
    PHRASES,
    SENTENCES,
    START,
    STOP,
)
from tidewheel.data.text.token_table import SPACE

_TO_LOWER = np.uint64(0x2020202020202020)
_BRACKETS, _ONES = np.uint64(0x5B5B5B5B5B5B5B5B), np.uint64(0x0101010101010101)
KEPT, LOREM, BRACED, FEW_SENTENCES = range(4)  # verdicts
LINES, KEPT_LINES, FOUND_SENTENCES, VERDICT = range(4)
COUNTS = 4  # columns of `judge`'s counts
OPTIONS = ("terminal_punctuation", "min_sentences", "min_words_per_line", "max_word_length", "javascript",
           "curly_bracket", "lorem_ipsum", "policy")  # in the order in which `judge` takes them


@numba.njit(nogil=True)
def _citation(data, i, end):
    """Return the length in bytes of the citation at i ([12], [], [edit] or [citation needed]); 0 if there is none."""
    if data[i] != 0x5B:
        return 0
    k = i + 1
    while k < end and 0x30 <= data[k] <= 0x39:
        k += 1
    if k < end and data[k] == 0x5D:
        return k + 1 - i
    for word in (b"edit]", b"citation needed]"):
        if i + 1 + len(word) <= end:
            same = True
            for j in range(len(word)):
                same &= data[i + 1 + j] == word[j]
            if same:
                return 1 + len(word)
    return 0


@numba.njit(nogil=True)
def _first_citation(text, i, end):
    """Return where the first citation in bytes [i, end) begins, or `end`. Eight bytes can be loaded anywhere."""
    at = np.int64(text.ctypes.data)
    while i < end:
        x = load(at + i) ^ _BRACKETS
        hits = (x - _ONES) & ~x & HIGH  # only the lowest set bit is exact
        if hits == 0:
            i += 8
            continue
        i += trailing_zeros(hits) >> 3
        if i < end and _citation(text, i, end) > 0:
            return i
        i += 1
    return end


@compiled
def cited_lines(text, lines, count, numbers, out, out_offsets):
    """Return the number of lines with citations.

    Fills numbers int32 (of these lines), and out uint8 with out_offsets: the lines without citations and without white
    space at both ends.
    """
    num_cited = o = 0
    out_offsets[0] = 0
    for line in range(count):
        if lines[line, MARKS] & BRACKET == 0:
            continue
        start, stop = np.int64(lines[line, FIRST]), np.int64(lines[line, LAST])
        i = _first_citation(text, start, stop)
        if i == stop:
            continue
        for k in range(start, i):
            out[o + k - start] = text[k]
        o += i - start
        while i < stop:
            size = _citation(text, i, stop)
            if size == 0:
                out[o] = text[i]
                o += 1
            i += max(size, 1)
        numbers[num_cited] = line
        num_cited += 1
        out_offsets[num_cited] = o
    return num_cited


@numba.njit(nogil=True)
def _contains(at, start, stop, phrases, first, last):
    """Return whether one of phrases [first, last) is in bytes [start, stop) of the text, in either case.

    phrases uint64 [n, 3]: the first eight bytes, the last eight, the length (8 to 16).
    """
    for i in range(start, stop - 9):
        begin = load(at + i) | _TO_LOWER
        for phrase in range(first, last):
            if begin == phrases[phrase, 0]:
                length = np.int64(phrases[phrase, 2])
                if i + length <= stop and load(at + i + length - 8) | _TO_LOWER == phrases[phrase, 1]:
                    return True
    return False


@numba.njit(nogil=True)
def _may_contain(at, start, stop):
    """Return whether a phrase may begin in bytes [start, stop)."""
    begins = False
    for i in range(start, stop, 64):
        begins |= phrase_begins(at + i)
    return begins


@numba.njit(nogil=True)
def _is_terminal(text, start, stop):
    """Return whether the line ends with one of . ? ! " ' but not with "..."."""
    if stop <= start:
        return False
    z = text[stop - 1]
    if z == 0x2E:
        return not (stop - start >= 3 and text[stop - 2] == 0x2E and text[stop - 3] == 0x2E)
    return z == 0x3F or z == 0x21 or z == 0x22 or z == 0x27


@compiled
def judge(text, lines, line_offsets, scanned, cited, cited_text, cited_lines_, cited_offsets, cited_scanned, phrases,
          options, keep, counts):
    """Judge each line, and each document by its lines.

    cited int32 [lines]: index of the line among those with citations, -1 for other lines; cited_text, cited_lines_,
    cited_offsets and cited_scanned are the scan of these lines. phrases uint64 [8, 3] (`_contains`): javascript, lorem
    ipsum, and six about policies. options int64: `OPTIONS`. Fills keep uint8 [lines] and counts int64 [n, COUNTS].
    """
    at, cited_at = np.int64(text.ctypes.data), np.int64(cited_text.ctypes.data)
    terminal, min_sentences, min_words, max_length = options[0], options[1], options[2], options[3]
    javascript, curly_bracket, lorem_ipsum, policy = options[4], options[5], options[6], options[7]
    for d in range(len(counts)):
        num_kept = sentences = verdict = with_words = 0
        for line in range(line_offsets[d], line_offsets[d + 1]):
            keep[line] = 0
            with_words += lines[line, CHUNKS] > 0
            if verdict != KEPT:
                continue
            if (max_length >= 0 and lines[line, LONGEST] > max_length) or lines[line, CHUNKS] < min_words:
                continue
            index = np.int64(cited[line])
            if index < 0:
                line_at = at
                start, stop = np.int64(lines[line, FIRST]), np.int64(lines[line, LAST])
                line_sentences, marks = np.int64(lines[line, SENTENCES]), lines[line, MARKS]
                may = scanned[d, PHRASES] != 0
                ends = _is_terminal(text, start, stop)
            else:
                row_of_line = cited_offsets[index]
                line_at = cited_at
                start, stop = np.int64(cited_lines_[row_of_line, START]), np.int64(cited_lines_[row_of_line, STOP])
                line_sentences, marks = np.int64(cited_lines_[row_of_line, SENTENCES]), cited_lines_[row_of_line, MARKS]
                may = cited_scanned[index, PHRASES] != 0
                ends = _is_terminal(cited_text, start, stop)
            if terminal and not ends:
                continue
            may = may and _may_contain(line_at, start, stop)
            if lorem_ipsum and may and _contains(line_at, start, stop, phrases, 1, 2):
                verdict = LOREM
                continue
            if javascript and may and _contains(line_at, start, stop, phrases, 0, 1):
                continue
            if curly_bracket and marks & BRACE != 0:
                verdict = BRACED
                continue
            if policy and may and _contains(line_at, start, stop, phrases, 2, 8):
                continue
            sentences += line_sentences
            num_kept += 1
            keep[line] = 1
        if verdict == KEPT and sentences < min_sentences:
            verdict = FEW_SENTENCES
        row = counts[d]
        row[LINES], row[KEPT_LINES] = with_words, num_kept
        row[FOUND_SENTENCES], row[VERDICT] = sentences, verdict


@numba.njit(nogil=True)
def _bare(data, start, stop, marks):
    """Return (start, stop) of the line without white space at both ends."""
    while start < stop:
        size = 1
        while start + size < stop and np.int64(data[start + size]) & 0xC0 == 0x80:
            size += 1
        if marks[_code(data, start, size)] & SPACE == 0:
            break
        start += size
    while stop > start:
        first = stop - 1
        while first > start and np.int64(data[first]) & 0xC0 == 0x80:
            first -= 1
        if marks[_code(data, first, stop - first)] & SPACE == 0:
            break
        stop = first
    return start, stop


@numba.njit(nogil=True)
def _code(data, i, size):
    """Return the code point of the `size` bytes at i."""
    code = np.int64(data[i])
    if size > 1:
        code &= 0x7F >> min(size, 4)
        for k in range(1, size):
            code = code << 6 | (np.int64(data[i + k]) & 0x3F)
    return min(code, 0x10FFFF)


@numba.njit(nogil=True)
def _copied(data, start, stop, out, o):
    """Copy bytes [start, stop) to out from index o on; return the index after them.

    Assigning a slice would make numba compile an error message about its shape.
    """
    for k in range(start, stop):
        out[o + k - start] = data[k]
    return o + stop - start


@compiled
def kept_text(data, offsets, first, marks, text_offsets, scanned, lines, line_offsets, cited, keep, counts,
              keep_wordless, out, out_offsets):
    """Write the documents' texts without removed lines to out, with out_offsets [n+1]. A dropped document is whole.

    keep_wordless int64: whether a line without words stays. A last line that has only characters which the clean copy
    leaves out is not among `lines`.
    """
    o = 0
    out_offsets[0] = 0
    for d in range(len(counts)):
        i, end = offsets[first + d], offsets[first + d + 1]
        if counts[d, VERDICT] != KEPT:
            o = _copied(data, i, end, out, o)
        else:
            begun = o
            same = scanned[d, BYTES] == end - i  # lines are at the same offsets as in the clean copy
            shift = i - text_offsets[d]
            for line in range(line_offsets[d], line_offsets[d + 1]):
                if same:
                    a, b = lines[line, FIRST] + shift, lines[line, LAST] + shift
                else:
                    stop = i
                    while stop < end and data[stop] != 10:
                        stop += 1
                    a, b = _bare(data, i, stop, marks) if keep[line] else (i, i)
                    i = stop + 1
                if not keep[line]:
                    continue
                if o > begun:
                    out[o] = 10
                    o += 1
                if cited[line] < 0:
                    o = _copied(data, a, b, out, o)
                    continue
                while a < b:
                    size = _citation(data, a, b)
                    if size == 0:
                        out[o] = data[a]
                        o += 1
                    a += max(size, 1)
            if not same and i < end and keep_wordless:
                if o > begun:
                    out[o] = 10
                    o += 1
                o = _copied(data, i, end, out, o)
            a, b = _bare(out, begun, o, marks)
            if a > begun:
                for k in range(a, b):
                    out[begun + k - a] = out[k]
            o = begun + b - a
        out_offsets[d + 1] = o
