"""The reader of JSONL files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import ClassVar

from tidewheel.data.quarantine import Bad
from tidewheel.data.reader import FileHead, FileMatch, Reader, SourceBytes
from tidewheel.data.readers import json_head, lines
from tidewheel.data.readers.packed import opened
from tidewheel.data.readers.record import RECORDS, Record
from tidewheel.versions import Version


class JsonLines(Reader):
    """Reader of JSONL: each line is an object and a record. Uncompressed files are read in ranges of bytes."""

    VERSION: ClassVar[Version | None] = Version("read_jsonl", uses=(RECORDS,))
    ENDINGS: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")
    FALLBACK: ClassVar[bool] = True
    ORDER: ClassVar[int] = 30
    SHOWN: ClassVar[str] = "JSONL"

    @classmethod
    def recognise(cls, head: FileHead) -> FileMatch | None:
        """Return a match if the first line begins with JSON and no value spans several lines."""
        is_json = json_head.is_object_over_lines(head.text) or json_head.is_array(head.text, is_whole=head.is_whole)
        return FileMatch() if head.text.startswith((b"{", b"[")) and not is_json else None

    def read(self, source: SourceBytes) -> Iterator[Record | Bad]:
        """Yield the records of a file."""
        return lines.records(source.store, source.key, source.config, source.name, source.span)

    def ranges(self, source: SourceBytes, size: int) -> list[tuple[int, int]]:
        """Return ranges of about `unit_bytes` if reading may begin in the middle of the file, else []."""
        step = source.config.unit_bytes
        return list(itertools.pairwise([*range(0, size, step), size])) if source.shape.is_seekable else []

    def is_empty(self, source: SourceBytes) -> bool:
        """Return whether the file contains only blank lines."""
        with opened(source.store, source.key) as stream:
            return lines.is_blank(stream)
