"""Parse the package's source files."""

from __future__ import annotations

import ast
from pathlib import Path

TRIES = 5


def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a Python file."""
    return parsed_text(path.read_text(encoding="utf-8"))


def parsed_text(text: str) -> ast.Module:
    """Return the syntax tree of a module's text.

    The parser of CPython 3.11 counts its depth per interpreter, not per thread. It raises SystemError when a thread of
    another test parses at the same time (https://github.com/python/cpython/issues/106905), so it is tried again.
    """
    for _ in range(TRIES - 1):
        try:
            return ast.parse(text)
        except SystemError:
            continue
    return ast.parse(text)
