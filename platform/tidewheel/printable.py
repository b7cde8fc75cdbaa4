"""Untrusted text made fit to be shown: what would move a cursor, colour a terminal or turn lines around is spelled
out."""

from __future__ import annotations

import re

# C0 and C1 controls; marks that reverse or hide text: bidirectional controls, zero-width spaces, byte order mark,
# interlinear and tag characters; separators of lines and paragraphs; lone surrogates
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
                     "\ud800-\udfff\U000e0000-\U000e007f]")
_KEPT_IN_LINES = frozenset("\n\t")


def printable(text: str) -> str:
    """Return the text in one line, with every control character spelled out: "\\x1b", "\\n", "\\u202e"."""
    return _HIDDEN.sub(_spelled, text)


def printable_lines(text: str) -> str:
    """Return the text with its lines and tabs, and every other control character spelled out."""
    return _HIDDEN.sub(lambda found: found[0] if found[0] in _KEPT_IN_LINES else _spelled(found),
                       text.replace("\r\n", "\n"))


def _spelled(found: re.Match[str]) -> str:
    character = found[0]
    if character in "\n\r\t":
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[character]
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
