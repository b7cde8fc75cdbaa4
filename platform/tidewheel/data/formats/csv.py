"""CSV: the first row names the fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from tidewheel.data.quarantine import Bad
from tidewheel.data.reader import Reader, SourceBytes
from tidewheel.data.readers import tables
from tidewheel.data.readers.record import RECORDS, Record
from tidewheel.versions import Version


class Csv(Reader):
    """A row a record; the first one names the fields."""

    VERSION: ClassVar[Version | None] = Version("read_csv", uses=(RECORDS,))
    ENDINGS: ClassVar[tuple[str, ...]] = (".csv",)
    SHOWN: ClassVar[str] = "CSV"

    def read(self, source: SourceBytes) -> Iterator[Record | Bad]:
        """Yield the records of a file."""
        return tables.records(source.place, source.key, source.config, source.name, source.shape.delimiter)
