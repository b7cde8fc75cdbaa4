"""The reader of Parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from tidewheel.data.quarantine import Bad
from tidewheel.data.reader import Reader, SourceBytes
from tidewheel.data.readers import columns
from tidewheel.data.readers.record import RECORDS, Record
from tidewheel.versions import Version


class Parquet(Reader):
    """Reader of Parquet: each row is a record. Large files are read in ranges of row groups."""

    VERSION: ClassVar[Version | None] = Version("read_parquet", uses=(RECORDS,))
    ENDINGS: ClassVar[tuple[str, ...]] = (".parquet", ".pq")
    SIGNATURES: ClassVar[tuple[bytes, ...]] = (b"PAR1",)
    BINARY: ClassVar[bool] = True
    SHOWN: ClassVar[str] = "a Parquet file"
    RANGES: ClassVar[str] = "row groups"

    def read(self, source: SourceBytes) -> Iterator[Record | Bad]:
        """Yield the records of a file."""
        return columns.records(source.store, source.key, "parquet", source.config, source.name, source.span)

    def ranges(self, source: SourceBytes, size: int) -> list[tuple[int, int]]:
        """Return ranges of row groups of about `unit_bytes` each."""
        ranges = columns.row_groups(source.store, source.key, source.config.unit_bytes)
        return ranges if len(ranges) > 1 else []
