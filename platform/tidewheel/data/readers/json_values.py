"""Read JSON that is not JSONL: an array of records, or records over several lines. Memory is bounded by one record.

The reader finds the ends of values by their brackets and quotes and parses each value separately, so that a bad record
does not affect the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tidewheel.data.config import ReadConfig
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers.lines import parse
from tidewheel.data.readers.packed import opened
from tidewheel.data.readers.record import Location, Record
from tidewheel.storage import Store

_READ_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_SPACE = re.compile(rb"[ \t\r\n]*+")
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)  # up to the closing quote, or half an escape
_BRACKETS = re.compile(rb'["{}\[\]]')
_PLAIN = re.compile(rb'[^\s,\[\]{"]*+')
_OPENING, _CLOSING = (b"{", b"["), (b"}", b"]")
_RUN, _STRETCH_BYTES, _DOUBLINGS = 32, 256, 12
_QUOTE, _ESCAPE = b'"'[0], b"\\"[0]


@dataclass(frozen=True)
class _Value:
    """Location and bytes of a value; of one that is too long, the first bytes.

    Args:
        line: number of the line in which it begins, from 1.
        offset: offset of its first byte.
        raw: its bytes.
        is_whole: False if the file ends inside the value.
    """

    line: int
    offset: int
    raw: bytes
    is_whole: bool = True


def records(store: Store, key: str, config: ReadConfig, name: str) -> Iterator[Record | Bad]:
    """Yield the elements of the file's array, or its values if the file is a sequence of values.

    Args:
        store: the store of the file.
        key: its key there.
        config: the settings of `read`.
        name: what quarantine calls the file.
    """
    limit = config.max_record_bytes
    with opened(store, key) as stream:
        for value in _values(_Window(stream), limit):
            location = Location(name, value.line, value.offset)
            if not value.is_whole:
                yield location.bad("truncated_file", value.raw, "the file ends inside a record or its array; records "
                                                                "before are kept")
            elif len(value.raw) > limit:
                yield location.bad("record_too_long", value.raw[:limit], f"more than {limit} bytes")
            else:
                yield parse(value.raw, config, file=name, line=value.line, offset=value.offset)


def _values(window: _Window, limit: int) -> Iterator[_Value]:
    in_array = False
    try:
        while mark := window.next_mark():
            if mark == b"," or (mark == b"[" and not in_array) or (mark == b"]" and in_array):
                in_array = (in_array or mark == b"[") and mark != b"]"
                window.step()
                continue
            value = window.value(limit)
            yield value
            if not value.is_whole:
                return
        if in_array:
            yield _Value(window.line, window.offset, b"", is_whole=False)
    except EOFError:  # the compressed data end too early
        yield _Value(window.line, window.offset, b"", is_whole=False)


class _Window:
    """A buffer over a stream, with the position up to which it has been consumed.

    Args:
        stream: a stream of bytes, at its beginning.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._data = b""
        self._position = 0
        self.line = 1
        self.offset = 0
        if self._more():
            self._position = len(_BOM) if self._data.startswith(_BOM) else 0
            self.offset = self._position

    def _more(self) -> bool:
        """Read more bytes and keep those not consumed yet. Return False at the end of the stream."""
        data = self._stream.read(_READ_BYTES)
        self._data = self._data[self._position :] + data
        self._position = 0
        return bool(data)

    def _consume(self, end: int) -> bytes:
        """Consume the bytes up to `end` and return them."""
        consumed = self._data[self._position : end]
        self.line += consumed.count(b"\n")
        self.offset += len(consumed)
        self._position = end
        return consumed

    def step(self) -> None:
        """Consume one byte."""
        self._consume(self._position + 1)

    def next_mark(self) -> bytes:
        """Return the next byte that is not white space, without consuming it; b"" at the end."""
        while True:
            match = _SPACE.match(self._data, self._position)
            assert match is not None, "the pattern matches the empty text"
            self._consume(match.end())
            if self._position < len(self._data):
                return self._data[self._position : self._position + 1]
            if not self._more():
                return b""

    def _until_quote(self, size: int) -> tuple[bytes, bool]:
        """Return (the next bytes, at most `size` and up to a quote; whether a quote follows them)."""
        stretch = self._data[self._position : self._position + size]
        quote = stretch.find(b'"')
        return (stretch[:quote], True) if quote >= 0 else (stretch, False)

    def value(self, limit: int) -> _Value:
        """Consume the value that begins here. Keep at most limit + 1 bytes of it."""
        line = self.line
        offset = self.offset
        kept = bytearray()

        def take(end: int) -> None:
            consumed = self._consume(end)
            if len(kept) <= limit:
                kept.extend(consumed[: limit + 1 - len(kept)])

        if self._data[self._position : self._position + 1] not in (b"{", b"[", b'"'):
            take(self._position + 1)
            while True:
                match = _PLAIN.match(self._data, self._position)
                assert match is not None, "the pattern matches the empty text"
                take(match.end())
                if self._position < len(self._data) or not self._more():
                    return _Value(line, offset, bytes(kept))
        depth = 0
        in_string = False
        run = 0  # brackets since the last quote; from `_RUN` on, process a whole stretch of bytes at once
        while True:
            if run >= _RUN and not in_string:
                stretch, quote = self._until_quote(_STRETCH_BYTES << min(run - _RUN, _DOUBLINGS))
                closing, depth = _walk(stretch, depth)
                is_closed = closing > 0
                in_string = quote and not is_closed
                take(self._position + (closing if is_closed else len(stretch) + quote))
                run = 0 if in_string else run + 1
            elif in_string:
                match = _IN_STRING.match(self._data, self._position)
                assert match is not None, "the pattern matches the empty text"
                end = match.end()
                is_closed = end < len(self._data) and self._data[end] == _QUOTE
                take(end + is_closed)
                in_string = not is_closed
            else:
                match = _BRACKETS.search(self._data, self._position)
                take(match.end() if match else len(self._data))
                mark = match.group() if match else b""
                in_string = mark == b'"'
                depth += (mark in _OPENING) - (mark in _CLOSING)
                is_closed = mark in _CLOSING
                run = 0 if in_string else run + 1
            if is_closed and depth <= 0:
                return _Value(line, offset, bytes(kept))
            left = len(self._data) - self._position
            is_stuck = not left or (left == 1 and in_string and self._data[self._position] == _ESCAPE)
            if is_stuck and not self._more():
                take(len(self._data))
                return _Value(line, offset, bytes(kept), is_whole=False)


def _walk(stretch: bytes, depth: int) -> tuple[int, int]:
    """Return (end of the bracket that closes the value, or 0 if none does; depth after the stretch).

    Args:
        stretch: bytes without a quote.
        depth: number of open brackets before it.
    """
    marks = np.frombuffer(stretch, np.uint8)
    closes = (marks == ord("]")) | (marks == ord("}"))
    opens = (marks == ord("[")) | (marks == ord("{"))
    depths = depth + np.cumsum(opens.astype(np.int8) - closes.astype(np.int8), dtype=np.int64)
    closing = closes & (depths <= 0)
    if closing.any():
        return int(closing.argmax()) + 1, 0
    return 0, int(depths[-1]) if len(depths) else depth
