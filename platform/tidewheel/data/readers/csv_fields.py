"""Split rows of CSV into fields, as RFC 4180 and Python's `csv` module do.

Python's module is not used because its limit for the length of a field applies to the whole process, and because it
does not report where in a file a row ends.
"""

from __future__ import annotations

import re
from functools import lru_cache


class MalformedError(ValueError):
    """A row in which a quote is not closed."""


def split_line(text: str, delimiter: str) -> list[str]:
    """Return the fields of a complete row, given without its line end.

    A field that begins with a quote ends at the next single quote; a double quote inside it stands for one. In other
    fields a quote is an ordinary character.

    Raises:
        MalformedError: a quote is not closed.
    """
    if '"' not in text:
        return text.split(delimiter)
    quoted, plain = _patterns(delimiter)
    fields: list[str] = []
    position = 0
    while True:
        if text.startswith('"', position):
            match = quoted.match(text, position + 1)
            assert match is not None, "the pattern matches the empty text"
            inside, mark, after = match.groups()
            if not mark:
                raise MalformedError("a quote is not closed")
            fields.append(inside.replace('""', '"') + after)
        else:
            match = plain.match(text, position)
            assert match is not None, "the pattern matches the empty text"
            fields.append(match.group())
        position = match.end()
        if position == len(text):
            return fields
        position += 1  # the delimiter


def is_open(line: bytes, delimiter: bytes, within: bool) -> bool:
    """Return whether a line ends inside quotes.

    Args:
        line: the line without its end.
        delimiter: the character that separates fields.
        within: whether the line begins inside quotes.
    """
    if b'"' not in line:
        return within
    quoted, plain = _byte_patterns(delimiter)
    position = 0
    while True:
        if within or line.startswith(b'"', position):
            match = quoted.match(line, position + (not within))
            assert match is not None, "the pattern matches the empty text"
            if not match.group(2):
                return True
            within = False
        else:
            match = plain.match(line, position)
            assert match is not None, "the pattern matches the empty text"
        position = match.end()
        if position == len(line):
            return False
        position += 1


@lru_cache
def _patterns(delimiter: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    mark = re.escape(delimiter)
    return re.compile(f'((?:[^"]++|"")*+)("?)([^{mark}]*+)', re.DOTALL), re.compile(f"[^{mark}]*+", re.DOTALL)


@lru_cache
def _byte_patterns(delimiter: bytes) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    mark = re.escape(delimiter)
    return (re.compile(b'((?:[^"]++|"")*+)("?)([^' + mark + b"]*+)", re.DOTALL),
            re.compile(b"[^" + mark + b"]*+", re.DOTALL))
