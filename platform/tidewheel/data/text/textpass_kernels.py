"""The compiled pass behind `textpass`: a document's tokens, words and lines, each read once.

A document is copied without dropped characters (see `unicode_table`) and with "\\r\\n" as "\\n", padded with spaces
so that eight bytes can be loaded anywhere. Everything else works on that copy. White space cuts it into chunks. A chunk
of ASCII letters, perhaps followed by one mark, takes a fast path; `token_kernels` decodes and cuts all others. Strings
count as equal if their 64-bit keys are equal.
"""

from __future__ import annotations

import numba
import numpy as np

from tidewheel.data.text.kernel_tools import (
    HIGH,
    SEED,
    TO_LOWER,
    absorb,
    compiled,
    decode,
    finish,
    get,
    letters,
    load,
    phrase_begins,
    plain,
    store,
    trailing_zeros,
)
from tidewheel.data.text.token_kernels import (
    ascii_words,
    bits_of,
    chunk_words,
    code_of,
    cut_chunk,
    cut_plain,
    decode_chunk,
    join_emoticons,
    maybe_special,
)
from tidewheel.data.text.token_table import (
    LETTER,
    PUNCTUATION,
    SENTENCE,
    SYMBOL,
)
from tidewheel.data.text.unicode_table import (
    CLASS_BITS,
    DROPPED,
)

PADDING = 128  # bytes behind a document's copy
STOP_WORD_MULTIPLIER = 0xA648A7DD06839EB9  # no two stop words share the top four bits of their key times this
EDGE, GAP = 2, 1  # kinds of ASCII bytes: a mark that may end a word; white space
_STOP_MULTIPLIER = np.uint64(STOP_WORD_MULTIPLIER)
_U0, _U1, _U7, _U60 = (np.uint64(n) for n in (0, 1, 7, 60))


@numba.njit(nogil=True)
def _clean(data, i, end, entries, out):
    """Copy a document into out as described above, padded with spaces; return (bytes, characters) of the copy."""
    o = characters = np.int64(0)
    source, target = np.int64(data.ctypes.data), np.int64(out.ctypes.data)
    limit = len(data) - 64
    while i < end:
        if i + 64 <= end and i <= limit and (o == 0 or out[o - 1] != 13) and plain(source + i):
            for j in range(0, 64, 8):
                store(target + o + j, load(source + i + j))
            o += 64
            characters += 64
            i += 64
            continue
        stop = min(i + 64, end)
        while i < stop:
            if data[i] < 0x80:
                if data[i] == 10 and o > 0 and out[o - 1] == 13:
                    o -= 1
                    characters -= 1
                out[o] = data[i]
                o += 1
                characters += 1
                i += 1
                continue
            code, size = decode(source, i, end)
            if np.int64(entries[code]) & CLASS_BITS != DROPPED:
                for j in range(size):
                    out[o + j] = data[i + j] if code != 0 else 0
                o += size
                characters += 1
            i += size
    out[o : o + PADDING] = 32
    return o, characters


CHARACTERS, BYTES, TOKENS, SYMBOLS, WORD_CHARACTERS, ALPHABETIC, STOP_WORDS, HASHES, ELLIPSES, PHRASES = range(10)
COUNTS = 10  # columns of `scan`'s counts
(START, STOP, LENGTH, FIRST, LAST, CHUNKS, LONGEST, SENTENCES, MARKS) = range(9)
LINE = 9  # columns of `scan`'s lines
BRACKET, BRACE = 1, 2  # bits of MARKS


@numba.njit(nogil=True)
def _phrases(at, start, end):
    """Return 1 if a phrase of C4 may begin in [start, end), else 0."""
    for i in range(start, end, 64):
        if phrase_begins(at + i):
            return 1
    return 0


@compiled
def scan(data, offsets, first, last, entries, blob, marks, ascii_kinds, stop_keys, special_words, want_tokens,
         want_words, scratch, text, text_offsets, keys, places, token_offsets,
         words, word_offsets, out, out_offsets, lines, line_offsets, counts):
    """Split documents [first, last) into tokens, words and lines.

    Fills for n documents: text uint8 (the clean copies) and text_offsets [n]; keys uint64 (a token's bytes, or their
    hash) and token_offsets [n+1]; places int32, the number of token characters before each token and after the last one
    (those of document d begin at token_offsets[d] + d); words uint64 and word_offsets [n+1], out uint8 and out_offsets
    [n+1] (the normalised text with its digits), as `kernels.scan_words`; lines int32 [:, LINE] and line_offsets [n+1];
    counts int64 [n, COUNTS]. ascii_kinds [256]: EDGE, GAP or 0 for each byte. stop_keys [16]: a perfect hash table.
    scratch: int64, four for each byte of the longest document and 32 more.
    """
    at, out_at = np.int64(text.ctypes.data), np.int64(out.ctypes.data)
    room = len(scratch) // 4
    spots = np.int64(scratch.ctypes.data)
    chars, stack = spots + 8 * (room), spots + 16 * (room)
    facts = spots + 24 * (room)
    specials, marks_at, keys_at = (
        np.int64(special_words.ctypes.data), np.int64(marks.ctypes.data), np.int64(keys.ctypes.data))
    words_at, entries_at, blob_at = (
        np.int64(words.ctypes.data), np.int64(entries.ctypes.data), np.int64(blob.ctypes.data))
    t, w, o, line, base = np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    token_offsets[0] = word_offsets[0] = out_offsets[0] = line_offsets[0] = 0
    for document in range(first, last):
        d = document - first
        size_of, characters = _clean(data, offsets[document], offsets[document + 1], entries, text[base:])
        text_offsets[d] = base
        i, end = base, base + size_of
        first_token, first_word = t, w
        place, symbols, symbol_characters, alphabetic, hashes, ellipses = 0, 0, 0, 0, 0, 0
        stop_words = np.int64(0)
        extra = np.int64(0)  # bytes beyond the first of each character so far
        # state of the open line
        begun, begun_extra, start, stop, chunks, most, sentences, seen, flags = i, extra, i, i, 0, 0, 0, 0, 0
        while i < end:
            kind = ascii_kinds[text[i]]
            if kind == GAP:
                if text[i] == 10:
                    row = lines[line]
                    row[START], row[STOP], row[LENGTH] = begun, i, i - begun - (extra - begun_extra)
                    row[FIRST], row[LAST], row[CHUNKS] = start, stop, chunks
                    row[LONGEST], row[SENTENCES], row[MARKS] = most, sentences, flags
                    line += 1
                    begun, begun_extra, start, stop = i + 1, extra, i + 1, i + 1
                    chunks, most, sentences, seen, flags = 0, 0, 0, 0, 0
                i += 1
                continue
            x = load(at + i)
            rest = ~letters(x) & HIGH
            length = trailing_zeros(rest) >> 3
            if length > 0:
                mask = ((rest & (~rest + _U1)) >> _U7) - _U1
                key = x & mask
                low = key | (TO_LOWER & mask)
                more = np.int64(0)
                h = SEED
                if length == 8:
                    h_raw = absorb(SEED, x)
                    h = absorb(h, low)
                    while True:
                        x = load(at + i + length)
                        rest = ~letters(x) & HIGH
                        more = trailing_zeros(rest) >> 3
                        mask = ((rest & (~rest + _U1)) >> _U7) - _U1
                        key = x & mask
                        low = key | (TO_LOWER & mask)
                        length += more
                        if more < 8:
                            break
                        h_raw = absorb(h_raw, key)
                        h = absorb(h, low)
                    # like key_of: exactly 8 bytes are their own key
                    key = load(at + i) if length == 8 else finish(h_raw, key, length)
                j = i + length
                kind = ascii_kinds[text[j]]
                edge = kind == EDGE and ascii_kinds[text[j + 1]] == GAP
                if edge and text[j] == 0x2E:
                    edge = length > 1 and text[j - 1] & 0x20 != 0
                    if edge and length < 8:
                        whole = key | np.uint64(0x2E) << np.uint64(8 * length)
                        edge = not maybe_special(whole, specials)
                if (kind == GAP or edge) and not maybe_special(key, specials):
                    if want_words:
                        out[o] = 32
                        o += w > first_word
                        if length < 8:
                            store(out_at + o, low)
                        else:
                            for k in range(0, length, 8):
                                store(out_at + o + k, load(at + i + k) | TO_LOWER)
                        o += length
                        words[w] = finish(h, low, length) if length != 8 else finish(h, _U0, length)
                        w += 1
                    if chunks == 0:
                        start = i
                    keys[t], places[t + d] = key, place
                    t += 1
                    place += length
                    alphabetic += 1
                    sentences += seen | (chunks == 0)
                    slot = np.int64((key * _STOP_MULTIPLIER) >> _U60)
                    stop_words |= np.int64(stop_keys[slot] == key) << slot
                    seen = 0
                    chunks += 1
                    most = max(most, length + edge)
                    if edge:
                        keys[t], places[t + d] = np.uint64(text[j]), place
                        t += 1
                        place += 1
                        symbols += 1
                        symbol_characters += 1
                        seen = np.int64(text[j] == 0x2E or text[j] == 0x21 or text[j] == 0x3F)
                        j += 1
                    stop = j
                    i = j + (text[j] == 32)  # skip a space, which ends no line; the padding consists of spaces
                    continue
            count, bits = decode_chunk(at, i, end, marks_at, spots, chars)
            if count == 0:  # white space beyond ASCII
                size = decode(at, i, end)[1]
                extra += size - 1
                i += size
                continue
            j = get(spots, count)
            extra += j - i - count
            if want_words and j - i == count:
                o, w = ascii_words(at, i, j, out_at, o, words_at, w, first_word)
            elif want_words:
                o, w = chunk_words(at, spots, chars, count, entries_at, blob_at, out_at, o, words_at, w, first_word)
            if chunks == 0:
                start = i
            stop = j
            if (bits | bits_of(chars, count - 1)) & PUNCTUATION != 0:
                dots = 0
                for k in range(count):
                    code = code_of(chars, k)
                    if code == 0x2E:
                        dots += 1
                        if dots == 3:
                            ellipses += 1
                            dots = 0
                    else:
                        dots = 0
                        ellipses += code == 0x2026
                        hashes += code == 0x23
                        flags |= (code == 0x5B) * BRACKET | (code == 0x7B) * BRACE
            first_of_chunk = t
            if not want_tokens:
                chunks += 1
                i = j
                continue
            cut = cut_plain(at, spots, chars, count, bits, specials, keys_at + 8 * first_of_chunk, facts)
            if cut == 0:
                cut = cut_chunk(at, spots, chars, count, bits, specials, stack, keys_at + 8 * first_of_chunk, facts)
                cut = join_emoticons(cut, specials, keys_at + 8 * first_of_chunk, facts)
            t += cut
            for k in range(first_of_chunk, t):
                kind, length = get(facts, k - first_of_chunk) & 0xFFFF, get(facts, k - first_of_chunk) >> 16
                places[k + d] = place
                place += length
                alphabetic += kind & LETTER != 0
                if kind & SYMBOL != 0:
                    symbols += 1
                    symbol_characters += length
                slot = np.int64((keys[k] * _STOP_MULTIPLIER) >> _U60)
                stop_words |= np.int64(stop_keys[slot] == keys[k]) << slot
                if kind & SENTENCE != 0:
                    sentences += (chunks == 0) & (k == first_of_chunk)
                    seen = 1
                elif (chunks == 0 and k == first_of_chunk) or (seen != 0 and kind & PUNCTUATION == 0):
                    sentences += 1
                    seen = 0
            chunks += 1
            most = max(most, count)
            i = j
        places[t + d] = place
        if begun < end or line == line_offsets[d]:  # what follows the last newline; an empty text has one empty line
            row = lines[line]
            row[START], row[STOP], row[LENGTH] = begun, end, end - begun - (extra - begun_extra)
            row[FIRST], row[LAST], row[CHUNKS] = start, stop, chunks
            row[LONGEST], row[SENTENCES], row[MARKS] = most, sentences, flags
            line += 1
        distinct = 0
        while stop_words != 0:
            stop_words &= stop_words - 1
            distinct += 1
        row64 = counts[d]
        row64[CHARACTERS], row64[BYTES] = characters, size_of
        row64[TOKENS], row64[SYMBOLS] = t - first_token, symbols
        row64[WORD_CHARACTERS], row64[ALPHABETIC], row64[STOP_WORDS] = place - symbol_characters, alphabetic, distinct
        row64[HASHES], row64[ELLIPSES], row64[PHRASES] = hashes, ellipses, _phrases(at, base, end)
        token_offsets[d + 1], word_offsets[d + 1], out_offsets[d + 1], line_offsets[d + 1] = t, w, o, line
        base = end + PADDING
