"""Read JSONL: each line that is not blank is a record. Memory is bounded by the size of a record, not of the file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from tidewheel.data.config import ReadConfig
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers.packed import Stream, opened
from tidewheel.data.readers.record import Location, Record, record
from tidewheel.storage import Store

_BOM = b"\xef\xbb\xbf"
_READ_BYTES = 1 << 20


def records(store: Store, key: str, config: ReadConfig, name: str, span: tuple[int, int] | None
            ) -> Iterator[Record | Bad]:
    """Yield the records of a file, or of a range of bytes of an uncompressed file.

    Adjacent ranges together yield the records of the whole file, wherever the file is cut. Line numbers are known only
    in a range that begins at 0.

    Args:
        store: the store of the file.
        key: its key there.
        config: the settings of `read`.
        name: what quarantine calls the file.
        span: bytes [first, last) in which the lines of the records begin; None for the whole file.
    """
    limit = config.max_record_bytes
    with opened(store, key) as stream:
        for line, offset, raw in numbered_lines(stream, limit, span):
            location = Location(name, line, offset)
            if raw is None:
                yield location.bad("truncated_file", b"", "the compressed data end too early; records before are kept")
            elif len(raw) > limit:
                yield location.bad("record_too_long", raw[:limit], f"more than {limit} bytes")
            elif raw.strip():
                yield parse(raw, config, file=name, line=line, offset=offset)


def numbered_lines(stream: Any, limit: int, span: tuple[int, int] | None) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield (line number or 0, offset, bytes without the line end) of each line.

    If compressed data end too early, the incomplete line comes last, with None for its bytes.

    Args:
        stream: the file, decompressed.
        limit: maximum length in bytes; a longer line is cut after limit + 1 bytes.
        span: bytes [first, last) in which the lines begin; None for the whole file.
    """
    first, last = span or (0, None)
    offset = _line_start(stream, first, last) if first else 0
    line = 0
    start = offset
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
    """Seek to the first line that begins at `first` or later and return its offset; `last` or more if there is none."""
    offset = stream.seek(first - 1, os.SEEK_SET)
    while last is None or offset < last:
        rest = stream.readline(_READ_BYTES)
        offset += len(rest)
        if not rest or rest.endswith(b"\n"):
            break
    return offset


def parse(raw: bytes, config: ReadConfig, *, file: str, line: int, offset: int) -> Record | Bad:
    """Return the record that a JSON object is, or its quarantine entry.

    Args:
        raw: the object's bytes.
        config: the settings of `read`.
        file: what quarantine calls the file.
        line: number of the line, from 1; 0 if unknown.
        offset: offset of the first byte.
    """
    location = Location(file, line, offset)
    try:
        values = json.loads(raw.decode("utf-8"), parse_constant=lambda _: None)  # NaN is not JSON
    except UnicodeDecodeError as error:
        return location.bad("wrong_encoding", raw, f"byte {error.start}: {error.reason}")
    except (ValueError, RecursionError) as error:
        return location.bad("invalid_json", raw, str(error) or type(error).__name__)
    if not isinstance(values, dict):
        return location.bad("not_an_object", raw, f"a JSON {type(values).__name__}")
    return record(values, config, location, raw)


def is_blank(stream: Stream) -> bool:
    """Return whether a stream, read from its beginning, contains only white space."""
    data = stream.read(_READ_BYTES).removeprefix(_BOM)
    while not data.strip():
        data = stream.read(_READ_BYTES)
        if not data:
            return True
    return False
