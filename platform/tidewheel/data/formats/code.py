"""Source trees: a file of code is a document, with path and language."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from tidewheel.data.quarantine import Bad
from tidewheel.data.reader import Reader, SourceBytes
from tidewheel.data.readers import code
from tidewheel.data.readers.record import RECORDS, Record
from tidewheel.versions import Version


class SourceCode(Reader):
    """A file a record; what is vendored, generated or no code is left out and counted. Its settings are `read.code`."""

    VERSION: ClassVar[Version | None] = Version("read_code", uses=(RECORDS,))
    TREE: ClassVar[bool] = True

    def read(self, source: SourceBytes) -> Iterator[Record | Bad | code.Skipped]:
        """Yield the records of a file."""
        return code.records(source.place, source.members, source.config)
