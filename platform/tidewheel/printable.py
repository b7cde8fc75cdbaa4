"""Make untrusted text safe to print: escape the characters that move a cursor, colour a terminal or reverse text."""

from __future__ import annotations

import re

# C0 and C1 controls; characters that reverse or hide text (bidirectional controls, zero-width spaces, byte order mark,
# interlinear and tag characters); line and paragraph separators; lone surrogates
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
                     "\ud800-\udfff\U000e0000-\U000e007f]")
_KEPT_IN_LINES = frozenset("\n\t")


def printable(text: str) -> str:
    """Return the text as one line, with control characters escaped: "\\x1b", "\\n", "\\u202e"."""
    return _HIDDEN.sub(_escaped, text)


def printable_lines(text: str) -> str:
    """Return the text with its newlines and tabs, and all other control characters escaped."""
    return _HIDDEN.sub(lambda match: match[0] if match[0] in _KEPT_IN_LINES else _escaped(match),
                       text.replace("\r\n", "\n"))


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    if character in "\n\r\t":
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[character]
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
