"""The fields of a row of CSV, as RFC 4180 and Python's `csv` have them.

That module has one limit for all of a process, and does not tell where in a file a row ends.
"""

from __future__ import annotations

import re
from functools import lru_cache


class MalformedError(ValueError):
    """A quote is not closed."""


def split_line(text: str, delimiter: str) -> list[str]:
    """The fields of a whole row without its line end.

    A field that begins with a quote ends at the next single one; two stand for one. Elsewhere a quote is a character.

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
            found = quoted.match(text, position + 1)
            assert found is not None, "the pattern matches the empty text"
            inside, mark, behind = found.groups()
            if not mark:
                raise MalformedError("a quote is not closed")
            fields.append(inside.replace('""', '"') + behind)
        else:
            found = plain.match(text, position)
            assert found is not None, "the pattern matches the empty text"
            fields.append(found.group())
        position = found.end()
        if position == len(text):
            return fields
        position += 1  # the delimiter


def is_open(line: bytes, delimiter: bytes, within: bool) -> bool:
    """True when the end of `line` is inside quotes; `within` says whether its beginning is."""
    if b'"' not in line:
        return within
    quoted, plain = _byte_patterns(delimiter)
    position = 0
    while True:
        if within or line.startswith(b'"', position):
            found = quoted.match(line, position + (not within))
            assert found is not None, "the pattern matches the empty text"
            if not found.group(2):
                return True
            within = False
        else:
            found = plain.match(line, position)
            assert found is not None, "the pattern matches the empty text"
        position = found.end()
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
