"""Recognise JSON that is not JSONL: an array of records, or an object over several lines."""

from __future__ import annotations

import json


def is_object_over_lines(text: bytes) -> bool:
    """Return whether text begins with a JSON object that does not end in its first line."""
    if not text.startswith(b"{"):
        return False
    first, newline, _ = text.partition(b"\n")
    if not newline or _parses(first):
        return False
    if first.strip() == b"{":
        return text[1:].lstrip()[:1] in (b'"', b"}")
    try:
        _, end = json.JSONDecoder().raw_decode(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return False
    return end > len(first)


def is_array(text: bytes, *, is_whole: bool) -> bool:
    """Return whether text begins with one JSON array of records; False for lines that are arrays.

    Args:
        text: the beginning of a file, without white space before it.
        is_whole: whether `text` is the whole file.
    """
    if not text.startswith(b"["):
        return False
    first, newline, rest = text.partition(b"\n")
    if newline and _parses(first) and rest.lstrip()[:1] not in (b"", b"]"):
        return False  # a line that is an array, and more lines
    inside = text[1:].lstrip()[:1]
    return inside == b"{" or (inside == b"]" and is_whole) or (inside == b"" and is_whole)


def _parses(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
