"""The compiled pass over the bytes of a text column that finds normalised words and their hashes.

Tables are arguments and never globals, which numba would freeze into the machine code. `text` documents the definition
that it implements. `textpass_kernels` implements it a second time, fused with all other measures.
"""

from __future__ import annotations

import numpy as np

from tidewheel.data.text.kernel_tools import SEED, absorb, compiled, decode, finish
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

_S8, _S64, _S0 = np.uint64(8), np.uint64(64), np.uint64(0)


@compiled
def scan_words(data, offsets, first, last, entries, blob, ascii_letters, keep_digits,
               out, out_offsets, hashes, starts, ends, word_offsets):
    """Find the words of documents [first, last) in one pass over their bytes.

    Fills out (uint8: normalised text) and out_offsets [n+1]; hashes uint64, starts and ends int64 (bytes
    from the document's start) of each word; word_offsets [n+1]. ascii_letters [256]: the lower-case
    letter, or 0. The caller sizes the buffers: 3 bytes and half a word per input byte.
    """
    at = np.int64(data.ctypes.data)
    o = np.int64(0)
    w = np.int64(0)
    out_offsets[0] = 0
    word_offsets[0] = 0
    for document in range(first, last):
        base, end = offsets[document], offsets[document + 1]
        i = base
        word_start = o  # where the open word begins in `out`
        is_open, solo, in_digits = False, False, False
        h, chunk, shift = SEED, _S0, _S0
        first_word = w
        while i < end:
            small = ascii_letters[data[i]]
            if small != 0 and is_open and not solo:  # most bytes are inside an ASCII word
                in_digits = False
                out[o] = small
                o += 1
                chunk |= np.uint64(small) << shift
                shift += _S8
                if shift == _S64:
                    h, chunk, shift = absorb(h, chunk), _S0, _S0
                i += 1
                continue
            code, size = decode(at, i, end)
            entry = np.int64(entries[code])
            kind = entry & CLASS_BITS
            if kind == DROPPED:
                i += size
                continue
            if is_open and (kind == SEPARATOR or kind == SOLO or (solo and kind != MARK)):
                hashes[w] = finish(h, chunk, o - word_start)
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
                h, chunk, shift = SEED, _S0, _S0
            if kind == DIGIT and not keep_digits:
                if not in_digits:
                    out[o] = 48
                    o += 1
                    chunk |= np.uint64(48) << shift
                    shift += _S8
                    if shift == _S64:
                        h, chunk, shift = absorb(h, chunk), _S0, _S0
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
                    h, chunk, shift = absorb(h, chunk), _S0, _S0
            i += size
        if is_open:
            hashes[w] = finish(h, chunk, o - word_start)
            ends[w] = end - base
            w += 1
        out_offsets[document - first + 1] = o
        word_offsets[document - first + 1] = w
