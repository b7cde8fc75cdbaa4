"""The reader of Arrow IPC files and streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from tidewheel.data.quarantine import Bad
from tidewheel.data.reader import Reader, SourceBytes
from tidewheel.data.readers import columns
from tidewheel.data.readers.record import RECORDS, Record
from tidewheel.versions import Version


class Arrow(Reader):
    """Reader of Arrow files: each row is a record."""

    VERSION: ClassVar[Version | None] = Version("read_arrow", uses=(RECORDS,))
    ENDINGS: ClassVar[tuple[str, ...]] = (".arrow", ".arrows", ".feather", ".ipc")
    SIGNATURES: ClassVar[tuple[bytes, ...]] = (b"ARROW1",)
    WEAK_SIGNATURES: ClassVar[tuple[bytes, ...]] = (b"\xff\xff\xff\xff",)
    BINARY: ClassVar[bool] = True
    SHOWN: ClassVar[str] = "an Arrow file"

    def read(self, source: SourceBytes) -> Iterator[Record | Bad]:
        """Yield the records of a file."""
        return columns.records(source.store, source.key, "arrow", source.config, source.name, source.span)
