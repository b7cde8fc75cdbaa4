"""The frozen character table of the definition of words: the class of each code point, and its folded form.

The package contains the table (`unicode_table.bin`, xz), because `unicodedata` changes with every Python release, but
published hashes must not. `build()` computes it on a Python whose `unicodedata.unidata_version` is `UNICODE_VERSION`;
a test compares the two. To write the file again:

    python -m tidewheel.data.text.unicode_table
"""

from __future__ import annotations

import lzma
import unicodedata
from functools import lru_cache
from pathlib import Path

import numpy as np

UNICODE_VERSION = "14.0.0"
CODE_POINTS = 0x110000
PATH = Path(__file__).with_name("unicode_table.bin")

# Class of a code point, the low three bits of its entry.
SEPARATOR = 0  # white space, punctuation, symbols, controls, unassigned: ends a word
LETTER = 1  # letters and letter-like or other numbers of scripts that put spaces between words
DIGIT = 2  # decimal digits of any script
DROPPED = 3  # diacritics, vowel points, format characters: ignored
SOLO = 4  # ideographs and letters of scripts without spaces between words: one word each
MARK = 5  # marks that carry meaning (vowel signs, kana voicing): part of the word they follow
CLASS_BITS = 7
ALPHABETIC = 8  # general category L*
SPACE = 16  # white space
UPPER = 32  # general category Lu or Lt
LENGTH_SHIFT, LENGTH_BITS = 6, 15  # bytes of the folded form; 0 = the character itself
OFFSET_SHIFT = 10  # where the folded form starts in the blob

_DIACRITICS = ((0x0300, 0x036F), (0x0483, 0x0487), (0x0591, 0x05C7), (0x0610, 0x061A), (0x064B, 0x065F),
               (0x0670, 0x0670), (0x06D6, 0x06ED), (0x1AB0, 0x1AFF), (0x1DC0, 0x1DFF), (0x20D0, 0x20FF),
               (0xFE00, 0xFE0F), (0xFE20, 0xFE2F), (0xE0100, 0xE01EF))
_SOLO_SCRIPTS = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3005, 0x3007), (0x3021, 0x3029),
                 (0x3041, 0x309F), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xA9E0, 0xA9FF), (0xAA60, 0xAA7F),
                 (0xF900, 0xFAFF), (0x20000, 0x3FFFF))


def classify(character: str) -> int:
    """Return the class of a code point, by this Python's `unicodedata`."""
    category = unicodedata.category(character)
    code = ord(character)
    if category == "Nd":
        return DIGIT
    if category[0] == "M":
        return DROPPED if _within(code, _DIACRITICS) else MARK
    if category == "Cf":
        return SEPARATOR if code == 0x200B else DROPPED  # the zero-width space separates words
    if category[0] in "LN":
        return SOLO if _within(code, _SOLO_SCRIPTS) else LETTER
    return SEPARATOR


def fold(character: str) -> str:
    """Return the folded form: NFD, lower case, NFD, without `DROPPED`; final sigma as sigma, digits as ASCII."""
    if unicodedata.category(character) == "Nd":
        return str(unicodedata.digit(character))
    lowered = "".join(part.lower() for part in unicodedata.normalize("NFD", character))
    kept = "".join(part for part in unicodedata.normalize("NFD", lowered) if classify(part) != DROPPED)
    return kept.replace("\u03c2", "\u03c3")


def build() -> tuple[np.ndarray, np.ndarray]:
    """Compute (entries uint32 [0x110000], blob uint8 [bytes]) from this Python's `unicodedata`."""
    entries = np.zeros(CODE_POINTS, np.uint32)
    blob = bytearray()
    starts: dict[bytes, int] = {}
    for code in range(CODE_POINTS):
        if 0xD800 <= code < 0xE000:
            continue  # surrogates do not occur in UTF-8
        character = chr(code)
        category = unicodedata.category(character)
        if category in ("Cn", "Co"):
            continue
        kind = classify(character)
        entry = kind | (ALPHABETIC if category[0] == "L" else 0) | (SPACE if character.isspace() else 0)
        entry |= UPPER if category in ("Lu", "Lt") else 0
        folded = fold(character).encode() if kind in (LETTER, DIGIT, SOLO, MARK) else b""
        if folded and folded != character.encode():
            if folded not in starts:
                starts[folded] = len(blob)
                blob += folded
            entry |= len(folded) << LENGTH_SHIFT | starts[folded] << OFFSET_SHIFT
        entries[code] = entry
    return entries, np.frombuffer(bytes(blob), np.uint8)


@lru_cache(maxsize=1)
def load() -> tuple[np.ndarray, np.ndarray]:
    """Return (entries uint32 [0x110000], blob uint8 [bytes]) of the package's table, as read-only arrays."""
    data = lzma.decompress(PATH.read_bytes())
    split = CODE_POINTS * 4
    return np.frombuffer(data[:split], "<u4"), np.frombuffer(data[split:], np.uint8)


def _within(code: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(first <= code <= last for first, last in ranges)


def main() -> None:
    """Write the package's table from this Python's `unicodedata`."""
    if unicodedata.unidata_version != UNICODE_VERSION:
        raise SystemExit(f"this Python has Unicode {unicodedata.unidata_version}; the table is {UNICODE_VERSION}")
    entries, blob = build()
    PATH.write_bytes(lzma.compress(entries.astype("<u4").tobytes() + blob.tobytes(), preset=9))


if __name__ == "__main__":
    main()
