"""Recognise CSV and TSV: find the delimiter, and check that the header has the columns that a recipe reads."""

from __future__ import annotations

from tidewheel.data.reader import FileHead, FileMatch
from tidewheel.data.readers.csv_fields import MalformedError, split_line

_DELIMITERS = {"csv": ",;|\t", "tsv": "\t,;|"}
"""Delimiters of each format, in the order in which they are tried."""
_LAYOUT_LINES = 6
_SHOWN_COLUMNS = 8
_PROBLEM_CHARACTERS = 300


def match(head: FileHead, kind: str) -> FileMatch | None:
    """Return a match if the file is a table of this format.

    A file that `read.format` or its name calls CSV or TSV is a table. Any other text is a table if its first line has
    the columns that the recipe reads, or if its first lines look like rows. It is TSV if tabs separate the fields.

    Args:
        head: the beginning of the file.
        kind: "csv" or "tsv".
    """
    if head.named not in _DELIMITERS and not head.may_be_any_text:
        return None
    table = _table(head)
    return table[1] if table is not None and table[0] == kind else None


def _table(head: FileHead) -> tuple[str, FileMatch] | None:
    """Return (format, match) of a table with a header; None if the text is not one."""
    named = head.named if head.named in _DELIMITERS else ""
    lines = head.text.decode("utf-8", "replace").splitlines()
    if not lines:
        return (named, FileMatch(delimiter=_DELIMITERS[named][0])) if named else None
    delimiters = _DELIMITERS[named or "csv"]
    for delimiter in delimiters:
        columns = _fields(lines[0], delimiter)
        if _has_requested(head, columns) and (named or len(columns) > 1):
            return named or _format_of(delimiter), FileMatch(delimiter=delimiter)
    if not (named or _looks_regular(lines)):
        return None
    delimiter = max(delimiters, key=lambda mark: len(_fields(lines[0], mark)))
    kind = named or _format_of(delimiter)
    return kind, _without_column(head, kind, delimiter, _fields(lines[0], delimiter))


def _format_of(delimiter: str) -> str:
    return "tsv" if delimiter == "\t" else "csv"


def _has_requested(head: FileHead, columns: list[str]) -> bool:
    """Return whether a header has all columns of a document's text, or a column of messages."""
    config = head.config
    if config.kind == "documents":
        return set(config.text_fields) <= set(columns)
    layouts = {config.messages, config.conversations, config.completion, config.output, config.chosen}
    return not layouts.isdisjoint(columns)


def _without_column(head: FileHead, kind: str, delimiter: str, columns: list[str]) -> FileMatch:
    """Return a match whose problem is the missing column."""
    config = head.config
    if config.kind == "documents":
        field, setting = next((name for name in config.text_fields if name not in columns), ""), "text"
    else:
        field, setting = config.messages, "messages"
    shown = ", ".join(map(repr, columns[:_SHOWN_COLUMNS])) + (", ..." if len(columns) > _SHOWN_COLUMNS else "")
    problem = f"{kind.upper()} without a column {field!r}; there are {shown}"[:_PROBLEM_CHARACTERS]
    return FileMatch(delimiter, problem, f"name the column with read.{setting}, or add a header line")


def _fields(line: str, delimiter: str) -> list[str]:
    """Return the fields of a line; [] if it ends inside quotes."""
    try:
        return [field.strip() for field in split_line(line, delimiter)]
    except MalformedError:
        return []


def _looks_regular(lines: list[str]) -> bool:
    """Return whether the first lines have the same number of delimiters, at least one, like rows of a table."""
    rows = [line for line in lines[:_LAYOUT_LINES] if line.strip()]
    if len(rows) < 3 or any(line.lstrip()[:1] in "{[" for line in rows):
        return False
    for delimiter in ",;\t|":
        widths = {len(_fields(line, delimiter)) for line in rows[:-1]}
        if len(widths) == 1 and widths.pop() > 1:
            return True
    return False
