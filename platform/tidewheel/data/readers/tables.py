"""CSV and TSV: the first row names the fields, every other row is a record. Memory is bounded by one record.

A value is text; an empty one is no value. A row may go over several lines inside quotes, so a file is read as a whole.
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
from tidewheel.data.readers.record import Place, Record, record
from tidewheel.storage import Store

Line = tuple[int, int, bytes | None]
"""(number, offset, bytes) of a line; without bytes where the file is cut off."""


@dataclass(frozen=True)
class _Row:
    """A row's place and bytes; or the reason why it is none, and the lines that are lost with it."""

    line: int
    offset: int
    raw: bytes
    reason: str = ""
    detail: str = ""
    lines: int = 1


def records(place: Store, key: str, config: ReadConfig, name: str, delimiter: str) -> Iterator[Record | Bad]:
    """The rows behind the header."""
    header: list[str] | None = None
    with opened(place, key) as stream:
        for row in _rows(_Lines(numbered_lines(stream, config.max_record_bytes, None)), delimiter.encode(),
                         config.max_record_bytes):
            here = Place(name, row.line, row.offset)
            if row.reason:
                yield replace(here.bad(row.reason, row.raw, row.detail), records=row.lines)
                continue
            try:
                fields = split_line(row.raw.decode("utf-8"), delimiter)
            except UnicodeDecodeError as error:
                yield here.bad("wrong_encoding", row.raw, f"byte {error.start}: {error.reason}")
                continue
            if header is None:
                header = _names(fields)
            elif len(fields) != len(header):
                yield here.bad("wrong_fields", row.raw, f"{len(fields)} fields, the header has {len(header)}")
            else:
                yield record(_values(header, fields, config), config, here, row.raw)


def _names(fields: list[str]) -> list[str]:
    """Names of the columns; one without a name is called by its number."""
    return [name.strip() or f"column_{number}" for number, name in enumerate(fields, start=1)]


def _values(header: list[str], fields: list[str], config: ReadConfig) -> dict[str, str]:
    """The record's fields; of two columns with one name the first."""
    values: dict[str, str] = {}
    for name, value in zip(header, fields, strict=True):
        if value or name in config.text_fields:
            values.setdefault(name, value)
    return values


class _Lines:
    """Lines that can be given back."""

    def __init__(self, lines: Iterator[Line]) -> None:
        self._lines, self._returned = lines, deque[Line]()

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
    """The row that begins with the line `first`."""
    number, offset, raw = first
    assert raw is not None
    parts, followed = [raw], list[Line]()
    size, lost = len(raw), 1
    within = is_open(raw, delimiter, False)
    while within:
        line = lines.next()
        if line is None or line[2] is None:
            if size <= limit:  # the quote was no opening one, or the file is cut off: what follows are rows again
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
