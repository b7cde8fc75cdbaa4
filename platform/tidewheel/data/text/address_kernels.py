"""URLs and e-mail addresses among the characters of a chunk; characters are as in `token_kernels`."""

from __future__ import annotations

import numba

from tidewheel.data.text.kernel_tools import load_signed
from tidewheel.data.text.token_table import LOWER, NUMERAL


@numba.njit(nogil=True)
def code_of(chars, k):
    return load_signed(chars + 8 * k) >> 16


@numba.njit(nogil=True)
def bits_of(chars, k):
    return load_signed(chars + 8 * k) & 0xFFFF


@numba.njit(nogil=True)
def _in_label(code):
    """Return 1 if a part of a host name may begin and end with the character, 2 if it may only be inside, else 0."""
    if (0x30 <= code <= 0x39) or (0x41 <= code <= 0x5A) or (0x61 <= code <= 0x7A) or 0xA1 <= code <= 0xFFFF:
        return 1
    return 2 if code == 0x2D or code == 0x5F else 0


@numba.njit(nogil=True)
def _host(chars, a, b):
    """Return whether [a, b) is host.name, perhaps with :port, /path, ?query or #fragment.

    A letter beyond the basic plane may be in the last label only.
    """
    k = label = a
    # complete labels; how many of them are numbers; whether the open label is lower-case, digits only, the last one
    labels, numbers, lower, plain, last = 0, 0, True, True, False
    while k < b:
        code = code_of(chars, k)
        inside = _in_label(code)
        if inside == 1:
            lower &= bits_of(chars, k) & LOWER != 0
            plain &= bits_of(chars, k) & NUMERAL != 0
        elif inside == 2 and k > label:
            lower = plain = False
        elif code > 0xFFFF and bits_of(chars, k) & LOWER != 0:
            plain, last = False, True
        elif code == 0x2E and k > label and not last and _in_label(code_of(chars, k - 1)) == 1:
            labels += 1
            numbers += plain and k - label <= 3
            label, lower, plain = k + 1, True, True
        else:
            break
        k += 1
    name = labels >= 1 and lower and 2 <= k - label <= 63
    address = labels == 3 and numbers == 3 and plain and 1 <= k - label <= 3
    if not (name or address):
        return False
    if k < b and code_of(chars, k) == 0x3A:
        digits = 0
        k += 1
        while k < b and bits_of(chars, k) & NUMERAL != 0:
            digits += 1
            k += 1
        if digits < 2 or digits > 5:
            return False
    return k == b or code_of(chars, k) == 0x2F or code_of(chars, k) == 0x3F or code_of(chars, k) == 0x23


@numba.njit(nogil=True)
def is_address(chars, a, b):
    """Return whether [a, b) is a URL or an e-mail address."""
    k = a
    while k < b:
        code = code_of(chars, k)
        if _in_label(code) == 0 and code != 0x2B and code != 0x2E:
            break
        k += 1
    start = a
    if k - a >= 2 and k + 2 < b and code_of(chars, k) == 0x3A:
        start = k + 3 if code_of(chars, k + 1) == 0x2F and code_of(chars, k + 2) == 0x2F else a
    matches = _host(chars, start, b)
    k = a + 1
    while k < b and not matches:
        matches = code_of(chars, k) == 0x40 and _host(chars, k + 1, b)
        k += 1
    return matches
