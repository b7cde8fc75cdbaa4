"""JSONL: a line is a record, blank lines are none. Memory is bounded by one record, never by the file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from tidewheel.data.config import ReadConfig
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers.packed import Stream, opened
from tidewheel.data.readers.record import Place, Record, record
from tidewheel.storage import Store

_BOM = b"\xef\xbb\xbf"
_READ_BYTES = 1 << 20


def records(place: Store, key: str, config: ReadConfig, name: str, span: tuple[int, int] | None
            ) -> Iterator[Record | Bad]:
    """The records of a file, or those whose lines begin in the bytes `span` [first, last) of a plain file.

    Ranges that follow each other give the records of the whole file, wherever they are cut; only a range that
    begins at 0 knows the numbers of its lines.
    """
    limit = config.max_record_bytes
    with opened(place, key) as stream:
        for line, offset, raw in numbered_lines(stream, limit, span):
            here = Place(name, line, offset)
            if raw is None:
                yield here.bad("truncated_file", b"", "the compressed data end too early; records before are kept")
            elif len(raw) > limit:
                yield here.bad("record_too_long", raw[:limit], f"more than {limit} bytes")
            elif raw.strip():
                yield parse(raw, config, file=name, line=line, offset=offset)


def numbered_lines(stream: Any, limit: int, span: tuple[int, int] | None) -> Iterator[tuple[int, int, bytes | None]]:
    """(line number or 0, offset, bytes without the line end) of each line; one too long is cut at limit + 1 bytes.

    Where compressed data end too early, the line that is not there as a whole comes last, without bytes.
    """
    first, last = span or (0, None)
    offset = _line_start(stream, first, last) if first else 0
    line, start = 0, offset
    try:
        while (last is None or offset < last) and (raw := stream.readline(limit + 2)):
            offset += len(raw)
            whole = raw.endswith(b"\n")
            raw = raw.rstrip(b"\r\n") if whole or len(raw) < limit + 2 else raw[: limit + 1]
            while not whole and (rest := stream.readline(_READ_BYTES)):  # skip to the line's end
                offset += len(rest)
                whole = rest.endswith(b"\n")
            if start == 0 and raw.startswith(_BOM):
                raw = raw[len(_BOM) :]
            line += 1
            yield 0 if first else line, start, raw
            start = offset
    except EOFError:
        yield 0 if first else line + 1, start, None


def _line_start(stream: Any, first: int, last: int | None) -> int:
    """Go to the first line that begins at `first` or later, and give its offset; `last` or more when there is none."""
    offset = stream.seek(first - 1, os.SEEK_SET)
    while last is None or offset < last:
        rest = stream.readline(_READ_BYTES)
        offset += len(rest)
        if not rest or rest.endswith(b"\n"):
            break
    return offset


def parse(raw: bytes, config: ReadConfig, *, file: str, line: int, offset: int) -> Record | Bad:
    """One line's bytes as a record, or what is wrong with it."""
    place = Place(file, line, offset)
    try:
        values = json.loads(raw.decode("utf-8"), parse_constant=lambda _: None)  # NaN is no JSON
    except UnicodeDecodeError as error:
        return place.bad("wrong_encoding", raw, f"byte {error.start}: {error.reason}")
    except (ValueError, RecursionError) as error:
        return place.bad("invalid_json", raw, str(error) or type(error).__name__)
    if not isinstance(values, dict):
        return place.bad("not_an_object", raw, f"a JSON {type(values).__name__}")
    return record(values, config, place, raw)


def is_blank(stream: Stream) -> bool:
    """True when a file, from its beginning, holds nothing but white space."""
    data = stream.read(_READ_BYTES).removeprefix(_BOM)
    while not data.strip():
        data = stream.read(_READ_BYTES)
        if not data:
            return True
    return False
