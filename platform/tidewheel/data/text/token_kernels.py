"""The tokens and normalised words of one chunk (no white space), by the rules of `gopher_quality` and `text`.

All of these are int64 arrays, passed by address: the chunk's characters (code << 16 | bits of `token_table`), their
byte offsets in the text (`places`), and its tokens. A token is characters << 16 | bits: LETTER if any character has it;
SYMBOL, PUNCTUATION and SENTENCE if all characters have it.
"""

from __future__ import annotations

import numba
import numpy as np

from tidewheel.data.text.address_kernels import bits_of, code_of, is_address
from tidewheel.data.text.kernel_tools import (
    HIGH,
    MULTIPLIER,
    SEED,
    TO_LOWER,
    absorb,
    decode,
    digits,
    finish,
    get,
    key_of,
    letters,
    load,
    load8,
    load16,
    load32,
    mask,
    put,
    store,
    store8,
    trailing_zeros,
)
from tidewheel.data.text.token_table import (
    ALPHA,
    CLOSES,
    CURRENCY,
    ICON,
    INFIX,
    LETTER,
    LOWER,
    NUMERAL,
    OPENS,
    PUNCTUATION,
    QUOTE,
    SENTENCE,
    SPACE,
    STOPS,
    SYMBOL,
    UPPER,
)
from tidewheel.data.text.unicode_table import (
    CLASS_BITS,
    DIGIT,
    DROPPED,
    LENGTH_BITS,
    LENGTH_SHIFT,
    MARK,
    OFFSET_SHIFT,
    SEPARATOR,
    SOLO,
)

# 64-bit words of the filter of special words; slots of their keys, and of their cuts; bytes of the longest one
SPECIAL_FILTER, SPECIAL_SLOTS, SPECIAL_BYTES = 1024, 4096, 16
_CUTS = ~np.int64(ALPHA | LOWER | UPPER | STOPS | LETTER)  # a character without these bits is inside a word
_U0, _U1, _U6, _U8, _U32, _U48, _U52, _U57, _U63, _U64, _U97, _U122, _U128 = (
    np.uint64(n) for n in (0, 1, 6, 8, 32, 48, 52, 57, 63, 64, 97, 122, 128))


@numba.njit(nogil=True)
def maybe_special(key, specials):
    """Return True for every key in the table of special words, and False for nearly all other keys."""
    bit = (key * MULTIPLIER) >> _U48
    return (load(specials + 8 * np.int64(bit >> _U6)) >> (bit & _U63)) & _U1 != _U0


@numba.njit(nogil=True)
def _find_special(key, specials):
    """Return the slot of a special word; -1 for other words."""
    if not maybe_special(key, specials):
        return np.int64(-1)
    slot = np.int64((key * MULTIPLIER) >> _U52)
    while True:
        entry = load(specials + 8 * (SPECIAL_FILTER + slot))
        if entry == key:
            return slot
        if entry == _U0:
            return np.int64(-1)
        slot = (slot + 1) & (SPECIAL_SLOTS - 1)


@numba.njit(nogil=True)
def _special(at, start, stop, specials):
    """Return the slot of bytes [start, stop) if they are a special word, else -1."""
    return np.int64(-1) if stop - start > SPECIAL_BYTES else _find_special(key_of(at, start, stop), specials)


@numba.njit(nogil=True)
def _prefix(chars, a, b):
    """Return the number of characters at the start of [a, b) that form a separate token."""
    code = code_of(chars, a)
    if bits_of(chars, a) & OPENS != 0:
        return 1
    if code == 0x2E:
        k = a + 1
        while k < b and code_of(chars, k) == 0x2E:
            k += 1
        return k - a if k - a >= 2 else 0
    if code == 0x2B:
        return 0 if a + 1 < b and bits_of(chars, a + 1) & NUMERAL != 0 else 1
    if code < 0x80 and b - a > 1 and code in (0x41, 0x43, 0x55):  # A$, C$, US$
        if code != 0x55 and code_of(chars, a + 1) == 0x24:
            return 2
        if code == 0x55 and b - a > 2 and code_of(chars, a + 1) == 0x53 and code_of(chars, a + 2) == 0x24:
            return 3
    return 0


@numba.njit(nogil=True)
def _suffix(at, places, chars, a, b, numerals, specials):
    """Return the number of characters at the end of [a, b) that form a separate token.

    numerals: whether the chunk has numerals.
    """
    if a >= b:
        return 0
    last = b - 1
    code = code_of(chars, last)
    before = bits_of(chars, last - 1) if last > a else np.int64(0)
    if code == 0x2E:
        k = last
        while k > a and code_of(chars, k - 1) == 0x2E:
            k -= 1
        if b - k >= 2:
            return b - k
        if before & STOPS != 0 or (before & UPPER != 0 and last - 2 >= a and bits_of(chars, last - 2) & UPPER != 0):
            return 1
        return 0
    if bits_of(chars, last) & CLOSES != 0:
        return 1
    if (code == 0x73 or code == 0x53) and last > a:
        mark = code_of(chars, last - 1)
        if mark == 0x27 or mark == 0x2019:
            return 2
    if not numerals:
        return 0
    if before & NUMERAL != 0 and (code == 0x2B or bits_of(chars, last) & CURRENCY != 0):
        return 1
    k = last
    while k >= a and b - k <= 4 and bits_of(chars, k) & NUMERAL == 0:
        k -= 1
    if k >= a and k < last and bits_of(chars, k) & NUMERAL != 0:
        key = key_of(at, get(places, k + 1), get(places, b))
        units = SPECIAL_FILTER + 2 * SPECIAL_SLOTS
        for unit in range(units + 1, units + 1 + get(specials, units)):
            if load(specials + 8 * unit) == key:
                return b - k - 1
    return 0


@numba.njit(nogil=True)
def _infix(chars, k, a, b):
    """Return the number of characters at k, inside [a, b), that cut it."""
    code = code_of(chars, k)
    if code == 0x2E and k + 1 < b and code_of(chars, k + 1) == 0x2E:
        stop = k + 1
        while stop < b and code_of(chars, stop) == 0x2E:
            stop += 1
        return stop - k
    if code == 0x2026 or bits_of(chars, k) & ICON != 0:
        return 1
    if k == a or k + 1 >= b:
        return 0
    before, behind = bits_of(chars, k - 1), bits_of(chars, k + 1)
    if code == 0x2E:
        return 1 if before & (LOWER | QUOTE) != 0 and behind & (UPPER | QUOTE) != 0 else 0
    if code == 0x2C:
        return 1 if before & ALPHA != 0 and behind & ALPHA != 0 else 0
    if (code == 0x2B or code == 0x2D or code == 0x2A or code == 0x5E) and before & NUMERAL != 0 and (
            behind & NUMERAL != 0 or code_of(chars, k + 1) == 0x2D):
        return 1
    if before & (ALPHA | NUMERAL) == 0:
        return 0
    if code == 0x3A or code == 0x3C or code == 0x3D or code == 0x3E or code == 0x2F or code == 0x7E:
        return 1 if behind & ALPHA != 0 else 0
    if code == 0x2D or code == 0x2013 or code == 0x2014:
        stop = k + 1
        most = 3 if code == 0x2D else 2 if code == 0x2014 else 1
        while stop < b and stop - k < most and code_of(chars, stop) == code:
            stop += 1
        return stop - k if stop < b and bits_of(chars, stop) & ALPHA != 0 else 0
    return 0


@numba.njit(nogil=True)
def _emit(at, places, chars, a, b, keys, facts, t):
    """Write characters [a, b) as token number t of the chunk; return the next number."""
    either, both = np.int64(0), np.int64(SYMBOL | PUNCTUATION | SENTENCE)
    for k in range(a, b):
        bits = bits_of(chars, k)
        either |= bits
        both &= bits
    if b - a > 1:
        both &= ~np.int64(SENTENCE)
    store(keys + 8 * t, key_of(at, get(places, a), get(places, b)))
    put(facts, t, (b - a) << 16 | (either & LETTER) | both)
    return t + 1


@numba.njit(nogil=True)
def cut_plain(at, places, chars, count, before, specials, keys, facts):
    """Write the tokens of a plain chunk and return their number; return 0 for any other chunk.

    Most chunks are plain: one character, or a word of letters, perhaps followed by one mark.
    before: bits of the characters before the last (`decode_chunk`).
    """
    last = bits_of(chars, count - 1)
    if count == 1:
        return _emit(at, places, chars, 0, 1, keys, facts, 0)
    if before & _CUTS != 0:
        return 0
    stop = count
    if last & _CUTS != 0:
        if last & CLOSES == 0 or code_of(chars, count - 1) == 0x2E or count == 2:
            return 0
        stop = count - 1
    start, end = get(places, 0), get(places, stop)
    key = key_of(at, start, end)
    if maybe_special(key, specials):
        return 0
    if stop < count and get(places, count) - start <= SPECIAL_BYTES and maybe_special(
            key_of(at, start, get(places, count)), specials):
        return 0
    store(keys, key)
    put(facts, 0, stop << 16 | ((before | (last if stop == count else 0)) & LETTER))
    return 1 if stop == count else _emit(at, places, chars, stop, count, keys, facts, 1)


@numba.njit(nogil=True)
def cut_chunk(at, places, chars, count, before, specials, stack, keys, facts):
    """Write the tokens of a decoded chunk of `count` characters and return their number; see `cut_plain`."""
    either = before | bits_of(chars, count - 1)
    numerals = either & NUMERAL != 0
    a, b, peeled, last, t = 0, count, 0, -1, 0
    special = np.int64(-1)
    while a < b and b - a != last:
        special = _special(at, get(places, a), get(places, b), specials)
        if special >= 0:
            break
        last = b - a
        prefix = _prefix(chars, a, b)
        if prefix > 0 and a + prefix < b:
            special = _special(at, get(places, a + prefix), get(places, b), specials)
            if special >= 0:
                t = _emit(at, places, chars, a, a + prefix, keys, facts, t)
                a += prefix
                break
        behind = _suffix(at, places, chars, a + prefix, b, numerals, specials)
        if behind > 0 and b - behind > a:
            special = _special(at, get(places, a), get(places, b - behind), specials)
            if special >= 0:
                b -= behind
                put(stack, peeled, b)
                peeled += 1
                break
        if prefix > 0:
            t = _emit(at, places, chars, a, a + prefix, keys, facts, t)
            a += prefix
        if behind > 0:
            b -= behind
            put(stack, peeled, b)
            peeled += 1
    if special >= 0:
        cuts = get(specials, SPECIAL_FILTER + SPECIAL_SLOTS + special)
        start = a
        while cuts != 0:
            stop = start
            offset = get(places, start) + (cuts & 15)
            while get(places, stop) < offset:
                stop += 1
            t = _emit(at, places, chars, start, stop, keys, facts, t)
            start, cuts = stop, cuts >> 4
        t = _emit(at, places, chars, start, b, keys, facts, t)
    elif a < b:
        start, k, looked = a, a if either & INFIX != 0 else b, False
        while k < b:
            if bits_of(chars, k) & INFIX == 0:
                k += 1
                continue
            size = _infix(chars, k, a, b)
            if size == 0 or k == a:
                k += max(size, 1)
                continue
            if not looked:
                looked = True
                if is_address(chars, a, b):
                    break
            t = _emit(at, places, chars, start, k, keys, facts, t) if k > start else t
            t = _emit(at, places, chars, k, k + size, keys, facts, t)
            k += size
            start = k
        if start < b:
            t = _emit(at, places, chars, start, b, keys, facts, t)
    while peeled > 0:
        peeled -= 1
        stop = get(stack, peeled - 1) if peeled > 0 else count
        t = _emit(at, places, chars, get(stack, peeled), stop, keys, facts, t)
    return t


@numba.njit(nogil=True)
def join_emoticons(count, specials, keys, facts):
    """Join neighbouring tokens of one character that form an emoticon; return the new number of tokens."""
    o = k = 0
    while k < count:
        key, fact = load(keys + 8 * k), get(facts, k)
        k += 1
        if k < count and fact >> 16 == 1 and key < _U128:
            other, behind = load(keys + 8 * k), get(facts, k)
            if behind >> 16 == 1 and other < _U128 and (fact | behind) & PUNCTUATION != 0:
                both = key | other << _U8
                if _find_special(both, specials) >= 0:
                    key = both
                    fact = 2 << 16 | (fact | behind) & LETTER | fact & behind & (SYMBOL | PUNCTUATION)
                    k += 1
        store(keys + 8 * o, key)
        put(facts, o, fact)
        o += 1
    return o


@numba.njit(nogil=True)
def _append(h, chunk, shift, value, size):
    """Return the state of a word's hash after `size` (1 to 8) more bytes. The other bytes of `value` are zero."""
    chunk |= value << shift
    filled = shift + _U8 * np.uint64(size)
    if filled < _U64:
        return h, chunk, filled
    return absorb(h, chunk), (value >> _U1) >> (_U63 - shift), filled - _U64


@numba.njit(nogil=True)
def ascii_words(at, i, end, out, o, words, w, first_word):
    """Append the words of a chunk of ASCII characters, bytes [i, end) of the text, as `chunk_words` does."""
    while i < end:
        x = load(at + i)
        alphabetic = letters(x)
        rest = ~(alphabetic | digits(x)) & HIGH
        length = trailing_zeros(rest) >> 3
        if length == 0:
            inside = ~rest & HIGH
            i += trailing_zeros(inside) >> 3
            continue
        store8(out + o, np.uint8(32))
        o += w > first_word
        if length < 8 and trailing_zeros(~alphabetic & HIGH) >> 3 >= length:
            low = (x | TO_LOWER) & mask(length)
            store(out + o, low)
            o += length
            i += length
            store(words + 8 * w, finish(SEED, low, length))
            w += 1
            continue
        h, chunk, shift, length, in_digits = SEED, _U0, _U0, 0, False
        while True:
            byte = np.uint64(load8(at + i))
            digit = _U48 <= byte <= _U57
            byte = byte if digit else byte | _U32
            if not digit and (byte < _U97 or byte > _U122):
                break
            store8(out + o, np.uint8(byte))
            o += 1
            i += 1
            if not (digit and in_digits):
                chunk |= (_U48 if digit else byte) << shift
                shift += _U8
                length += 1
                if shift == _U64:
                    h, chunk, shift = absorb(h, chunk), _U0, _U0
            in_digits = digit
        store(words + 8 * w, finish(h, chunk, length))
        w += 1
    return o, w


@numba.njit(nogil=True)
def chunk_words(at, places, chars, count, entries, blob, out, o, words, w, first_word):
    """Append the normalised words of a decoded chunk, as `kernels.scan_words`; return (next byte of out, next word).

    out keeps digits as they are; in the words' hashes a run of digits is "0". Eight bytes can be loaded anywhere in the
    text and the blob, and stored anywhere in out.
    """
    is_open, solo, in_digits = False, False, False
    h, chunk, shift, length = SEED, _U0, _U0, 0
    for k in range(count):
        entry = np.int64(load32(entries + 4 * code_of(chars, k)))
        kind = entry & CLASS_BITS
        if is_open and (kind == SEPARATOR or kind == SOLO or (solo and kind != MARK)):
            store(words + 8 * w, finish(h, chunk, length))
            w += 1
            is_open = False
        if kind == SEPARATOR or kind == DROPPED:
            continue
        if not is_open:
            if w > first_word:
                store8(out + o, np.uint8(32))
                o += 1
            is_open, solo, in_digits = True, kind == SOLO, False
            h, chunk, shift, length = SEED, _U0, _U0, 0
        size = entry >> LENGTH_SHIFT & LENGTH_BITS
        source = blob + (entry >> OFFSET_SHIFT) if size > 0 else at + get(places, k)
        if kind == DIGIT:
            store8(out + o, load8(source))
            o += 1
            if not in_digits:
                h, chunk, shift = _append(h, chunk, shift, _U48, 1)
                length += 1
            in_digits = True
            continue
        in_digits = False
        rest = size if size > 0 else get(places, k + 1) - get(places, k)
        length += rest
        while rest > 0:
            count_of = min(rest, 8)
            value = load(source) & mask(count_of)
            store(out + o, value)
            h, chunk, shift = _append(h, chunk, shift, value, count_of)
            o += count_of
            source += count_of
            rest -= count_of
    if is_open:
        store(words + 8 * w, finish(h, chunk, length))
        w += 1
    return o, w


@numba.njit(nogil=True)
def decode_chunk(at, i, end, marks, places, chars):
    """Decode the chunk at i into places [n+1] and chars [n].

    Returns (n, the union of the bits of all characters but the last).
    """
    count, before, bits = 0, np.int64(0), np.int64(0)
    while i < end:
        code, size = np.int64(load8(at + i)), 1
        if code >= 0x80:
            code, size = decode(at, i, end)
        bits_here = np.int64(load16(marks + 2 * code))
        if bits_here & SPACE != 0:
            break
        before |= bits
        bits = bits_here
        put(places, count, i)
        put(chars, count, code << 16 | bits)
        count += 1
        i += size
    put(places, count, i)
    return count, before
