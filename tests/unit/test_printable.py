from __future__ import annotations

import sys
import unicodedata

import pytest

from tidewheel.printable import printable, printable_lines


def test_controls_are_spelled_out():
    assert printable("a\x1b[31mb\r\nc\td\x00\x7f\x9b\u202e\u2066\u200b\ufeff\U000e0041") == (
        "a\\x1b[31mb\\r\\nc\\td\\x00\\x7f\\x9b\\u202e\\u2066\\u200b\\ufeff\\U000e0041")
    assert printable_lines("a\r\n\tb\rc\x1b") == "a\n\tb\\rc\\x1b"


def test_text_of_every_script_stays():
    text = "naïve 東京 नमस्ते می‌خواهم 👩‍👩‍👧 ёлка \\x1b"
    assert printable(text) == text


@pytest.mark.parametrize("category", ["Cc", "Zl", "Zp", "Cs"])
def test_no_control_character_is_left(category: str):
    every = "".join(chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) == category)
    assert every
    assert not set(printable(every)) & set(every)
    assert set(printable_lines(every)) & set(every) <= {"\n", "\t"}
