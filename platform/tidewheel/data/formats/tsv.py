"""The reader of TSV files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from tidewheel.data.quarantine import Bad
from tidewheel.data.reader import FileHead, FileMatch, Reader, SourceBytes
from tidewheel.data.readers import table_head, tables
from tidewheel.data.readers.record import RECORDS, Record
from tidewheel.versions import Version


class Tsv(Reader):
    """Reader of TSV: the first row names the fields, every other row is a record."""

    VERSION: ClassVar[Version | None] = Version("read_tsv", uses=(RECORDS,))
    ENDINGS: ClassVar[tuple[str, ...]] = (".tsv", ".tab")
    ORDER: ClassVar[int] = 50
    SHOWN: ClassVar[str] = "TSV"

    @classmethod
    def recognise(cls, head: FileHead) -> FileMatch | None:
        """Return a match if the file is a TSV table."""
        return table_head.match(head, "tsv")

    def read(self, source: SourceBytes) -> Iterator[Record | Bad]:
        """Yield the records of a file."""
        return tables.records(source.store, source.key, source.config, source.name, source.shape.delimiter)
