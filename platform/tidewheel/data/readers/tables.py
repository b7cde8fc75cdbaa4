"""Read CSV and TSV: the first row names the fields, every other row is a record. Memory is bounded by one record.

Values are text; an empty field has no value. A row may span several lines inside quotes, so a file is never cut into
ranges.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tidewheel.data.config import ReadConfig
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers.csv_fields import is_open, split_line
from tidewheel.data.readers.lines import numbered_lines
from tidewheel.data.readers.packed import opened
from tidewheel.data.readers.record import Location, Record, record
from tidewheel.storage import Store

Line = tuple[int, int, bytes | None]
"""(number, offset, bytes) of a line; None for bytes where the file is cut off."""


@dataclass(frozen=True)
class _Row:
    """Location and bytes of a row; for a bad row also the reason, and the number of lines that are lost with it."""

    line: int
    offset: int
    raw: bytes
    reason: str = ""
    detail: str = ""
    lines: int = 1


def records(store: Store, key: str, config: ReadConfig, name: str, delimiter: str) -> Iterator[Record | Bad]:
    """Yield the rows after the header.

    Args:
        store: the store of the file.
        key: its key there.
        config: the settings of `read`.
        name: what quarantine calls the file.
        delimiter: the character that separates fields.
    """
    header: list[str] | None = None
    with opened(store, key) as stream:
        for row in _rows(_Lines(numbered_lines(stream, config.max_record_bytes, None)), delimiter.encode(),
                         config.max_record_bytes):
            location = Location(name, row.line, row.offset)
            if row.reason:
                yield replace(location.bad(row.reason, row.raw, row.detail), records=row.lines)
                continue
            try:
                fields = split_line(row.raw.decode("utf-8"), delimiter)
            except UnicodeDecodeError as error:
                yield location.bad("wrong_encoding", row.raw, f"byte {error.start}: {error.reason}")
                continue
            if header is None:
                header = _names(fields)
            elif len(fields) != len(header):
                yield location.bad("wrong_fields", row.raw, f"{len(fields)} fields, the header has {len(header)}")
            else:
                yield record(_values(header, fields, config), config, location, row.raw)


def _names(fields: list[str]) -> list[str]:
    """Return the names of the columns: "column_3" for a third column without a name."""
    return [name.strip() or f"column_{position}" for position, name in enumerate(fields, start=1)]


def _values(header: list[str], fields: list[str], config: ReadConfig) -> dict[str, str]:
    """Return the record's fields. The first of two columns with the same name counts."""
    values: dict[str, str] = {}
    for name, value in zip(header, fields, strict=True):
        if value or name in config.text_fields:
            values.setdefault(name, value)
    return values


class _Lines:
    """An iterator of lines with push-back."""

    def __init__(self, lines: Iterator[Line]) -> None:
        self._lines = lines
        self._returned = deque[Line]()

    def next(self) -> Line | None:
        return self._returned.popleft() if self._returned else next(self._lines, None)

    def give_back(self, lines: list[Line]) -> None:
        self._returned.extendleft(reversed(lines))


def _rows(lines: _Lines, delimiter: bytes, limit: int) -> Iterator[_Row]:
    while (first := lines.next()) is not None:
        number, offset, raw = first
        if raw is None:
            yield _Row(number, offset, b"", "truncated_file", "the compressed data end too early; rows before are kept")
        elif len(raw) > limit:
            yield _Row(number, offset, raw[:limit], "record_too_long", f"more than {limit} bytes")
        elif raw.strip():
            yield _row(first, lines, delimiter, limit)


def _row(first: Line, lines: _Lines, delimiter: bytes, limit: int) -> _Row:
    """Return the row that begins with the line `first`."""
    number, offset, raw = first
    assert raw is not None
    parts = [raw]
    followed = list[Line]()
    size = len(raw)
    lost = 1
    within = is_open(raw, delimiter, False)
    while within:
        line = lines.next()
        if line is None or line[2] is None:
            if size <= limit:  # not an opening quote, or the file is cut off: read what follows as rows again
                lines.give_back([*followed, *([line] if line else [])])
                return _Row(number, offset, raw, "invalid_csv", "a quote that begins in this row is never closed")
            if line:
                lines.give_back([line])
            break
        within = is_open(line[2], delimiter, True)
        size += 1 + len(line[2])
        lost += 1
        if size <= limit:
            parts.append(line[2])
            followed.append(line)
        else:
            followed = []
    if size > limit:
        return _Row(number, offset, b"\n".join(parts)[:limit], "record_too_long", f"more than {limit} bytes", lost)
    return _Row(number, offset, b"\n".join(parts))
