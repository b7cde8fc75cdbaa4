"""Compiled passes over the bytes of a text column: words and their hashes, Gopher counts.

Every function is nopython, releases the GIL and is cached on disk; tables come in as arguments, never
as globals (numba would freeze them into the machine code). Functions of this file call only functions
of this file: numba's cache does not notice a change in another one.

The definitions these implement are written in `text` (words) and `quality` (tokens).
"""

from __future__ import annotations

import numba
import numpy as np

from tidewheel.data.unicode_table import (
    ALPHABETIC,
    CLASS_BITS,
    DIGIT,
    DROPPED,
    LENGTH_BITS,
    LENGTH_SHIFT,
    LETTER,
    MARK,
    OFFSET_SHIFT,
    SEPARATOR,
    SOLO,
    SPACE,
    UPPER,
)

_SEED = np.uint64(0x8F1BBCDCCA62C1D6)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_FMIX_1, _FMIX_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_S32, _S33, _S8, _S64, _S0 = np.uint64(32), np.uint64(33), np.uint64(8), np.uint64(64), np.uint64(0)


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
def _absorb(h, chunk):
    h = (h ^ chunk) * _MULTIPLIER
    return h ^ (h >> _S32)


@numba.njit(nogil=True)
def _finish(h, chunk, length):
    """Last partial chunk and the length, then the 64-bit murmur finaliser."""
    h = _absorb(h, chunk) ^ np.uint64(length)
    h = (h ^ (h >> _S33)) * _FMIX_1
    h = (h ^ (h >> _S33)) * _FMIX_2
    return h ^ (h >> _S33)


@numba.njit(nogil=True, cache=True)
def scan_words(data, offsets, first, last, entries, blob, ascii_letters, keep_digits,
               out, out_offsets, hashes, starts, ends, word_offsets):
    """Words of documents [first, last): one pass over their bytes.

    Fills out (uint8: normalised text) and out_offsets [n+1]; hashes uint64, starts and ends int64 (bytes
    from the document's start) of each word; word_offsets [n+1]. ascii_letters [256]: the lower-case
    letter, or 0. Returns nothing; the caller sizes the buffers (3 bytes, half a word per byte).
    """
    o = np.int64(0)
    w = np.int64(0)
    out_offsets[0] = 0
    word_offsets[0] = 0
    for document in range(first, last):
        base, end = offsets[document], offsets[document + 1]
        i = base
        word_start = o  # where the open word begins in `out`
        is_open, solo, in_digits = False, False, False
        h, chunk, shift = _SEED, _S0, _S0
        first_word = w
        while i < end:
            small = ascii_letters[data[i]]
            if small != 0 and is_open and not solo:  # inside an ASCII word: most bytes end here
                in_digits = False
                out[o] = small
                o += 1
                chunk |= np.uint64(small) << shift
                shift += _S8
                if shift == _S64:
                    h, chunk, shift = _absorb(h, chunk), _S0, _S0
                i += 1
                continue
            code, size = _decode(data, i, end)
            entry = np.int64(entries[code])
            kind = entry & CLASS_BITS
            if kind == DROPPED:
                i += size
                continue
            if is_open and (kind == SEPARATOR or kind == SOLO or (solo and kind != MARK)):
                hashes[w] = _finish(h, chunk, o - word_start)
                ends[w] = i - base
                w += 1
                is_open = False
            if kind == SEPARATOR:
                i += size
                continue
            if not is_open:
                if w > first_word:
                    out[o] = 32
                    o += 1
                word_start = o
                starts[w] = i - base
                is_open, solo, in_digits = True, kind == SOLO, False
                h, chunk, shift = _SEED, _S0, _S0
            if kind == DIGIT and not keep_digits:
                if not in_digits:
                    out[o] = 48
                    o += 1
                    chunk |= np.uint64(48) << shift
                    shift += _S8
                    if shift == _S64:
                        h, chunk, shift = _absorb(h, chunk), _S0, _S0
                in_digits = True
                i += size
                continue
            in_digits = False
            length = entry >> LENGTH_SHIFT & LENGTH_BITS
            place = entry >> OFFSET_SHIFT
            for j in range(length if length > 0 else size):
                byte = blob[place + j] if length > 0 else data[i + j]
                out[o] = byte
                o += 1
                chunk |= np.uint64(byte) << shift
                shift += _S8
                if shift == _S64:
                    h, chunk, shift = _absorb(h, chunk), _S0, _S0
            i += size
        if is_open:
            hashes[w] = _finish(h, chunk, o - word_start)
            ends[w] = end - base
            w += 1
        out_offsets[document - first + 1] = o
        word_offsets[document - first + 1] = w


@numba.njit(nogil=True)
def _stop_word_bit(packed, length):
    """Bit of {the, be, to, of, and, that, have, with}, its letters packed big-endian; 0 for other words."""
    if length == 2:
        if packed == 0x6265:
            return 2
        if packed == 0x746F:
            return 4
        if packed == 0x6F66:
            return 8
    elif length == 3:
        if packed == 0x746865:
            return 1
        if packed == 0x616E64:
            return 16
    elif length == 4:
        if packed == 0x74686174:
            return 32
        if packed == 0x68617665:
            return 64
        if packed == 0x77697468:
            return 128
    return 0


@numba.njit(nogil=True)
def _peek(data, i, end, entries):
    """Entry of the next character that is not dropped; that of a separator at the end."""
    while i < end:
        code, size = _decode(data, i, end)
        entry = np.int64(entries[code])
        if entry & CLASS_BITS != DROPPED:
            return entry
        i += size
    return np.int64(SEPARATOR)


@numba.njit(nogil=True, cache=True)
def gopher_counts(data, offsets, first, last, entries, ascii_letters, counts):
    """Counts of documents [first, last) into counts [n, 10] int64, columns as `quality.COUNTS`."""
    for document in range(first, last):
        i, end = offsets[document], offsets[document + 1]
        tokens = symbols = characters = alphabetic_tokens = stop_words = 0
        hashes = ellipses = lines = bullet_lines = ellipsis_lines = 0
        # the open token: 0 none, 1 word, 2 solo word, 3 run of one symbol
        state, symbol, length, alphabetic, packed = 0, np.int64(-1), 0, False, np.int64(0)
        previous_kind, previous_code = np.int64(SEPARATOR), np.int64(-1)
        dots = tail = 0  # dots towards the next "..."; dots in a row at the end of the line so far
        blank, in_line = True, False
        while i < end:
            if state == 1 and ascii_letters[data[i]] != 0:  # most bytes are letters inside an ASCII word
                previous_code, previous_kind = np.int64(data[i]), np.int64(LETTER)
                packed = (packed << 8 | previous_code) & 0xFFFFFFFF
                length += 1
                alphabetic = True
                dots = tail = 0
                i += 1
                continue
            code, size = _decode(data, i, end)
            entry = np.int64(entries[code])
            kind = entry & CLASS_BITS
            i += size
            if kind == DROPPED:
                continue
            if code == 10:
                lines += 1
                ellipsis_lines += tail >= 3
                dots, tail, blank, in_line = 0, 0, True, False
            else:
                in_line = True
                space = entry & SPACE != 0
                if blank and not space:
                    blank = False
                    bullet_lines += code == 0x2D or code == 0x2022
                if code == 0x2E:
                    dots += 1
                    if dots == 3:
                        ellipses += 1
                        dots = 0
                    tail = tail + 1 if previous_code == 0x2E else 1
                else:
                    dots = 0
                    if code == 0x2026:
                        ellipses += 1
                        tail = 3
                    elif not space:
                        tail = 0
                hashes += code == 0x23
            previous_code = code
            joins = False  # a symbol that belongs to the word around it
            clitic = False  # an apostrophe that begins the next word
            if kind == SEPARATOR and state == 1 and (
                    code == 0x5F or code == 0x2E or code == 0x2C or code == 0x3A or code == 0x27 or code == 0x2019):
                next_entry = _peek(data, i, end, entries)
                next_kind = next_entry & CLASS_BITS
                wordlike = next_kind == LETTER or next_kind == DIGIT or next_kind == MARK
                if code == 0x5F:
                    joins = wordlike
                elif code == 0x2E:
                    joins = wordlike and next_entry & UPPER == 0
                elif code == 0x2C or code == 0x3A:
                    joins = next_kind == DIGIT and previous_kind == DIGIT
                else:
                    clitic = wordlike
            extends = joins or (state == 1 and (kind == LETTER or kind == DIGIT or kind == MARK)) or (
                state == 2 and kind == MARK) or (
                state == 3 and code == symbol)
            previous_kind = kind
            if not extends:
                if state == 3:
                    tokens += 1
                    symbols += 1
                elif state != 0:
                    tokens += 1
                    characters += length
                    alphabetic_tokens += alphabetic
                    stop_words |= _stop_word_bit(packed, length)
                state, length, alphabetic, packed, symbol = 0, 0, False, np.int64(0), np.int64(-1)
                if kind == SEPARATOR and not clitic:
                    if entry & SPACE != 0:
                        continue
                    state, symbol = 3, code
                else:
                    state = 2 if kind == SOLO else 1
            if state != 3:
                length += 1
                alphabetic |= entry & ALPHABETIC != 0
                packed = (packed << 8 | code) & 0xFFFFFFFF if code < 0x80 else np.int64(-1) & 0xFFFFFFFF
        if state == 3:
            tokens += 1
            symbols += 1
        elif state != 0:
            tokens += 1
            characters += length
            alphabetic_tokens += alphabetic
            stop_words |= _stop_word_bit(packed, length)
        if in_line:
            lines += 1
            ellipsis_lines += tail >= 3
        distinct = 0
        while stop_words != 0:
            stop_words &= stop_words - 1
            distinct += 1
        row = counts[document - first]
        row[0], row[1], row[2], row[3], row[4] = tokens, symbols, characters, alphabetic_tokens, distinct
        row[5], row[6], row[7], row[8], row[9] = hashes, ellipses, lines, bullet_lines, ellipsis_lines
