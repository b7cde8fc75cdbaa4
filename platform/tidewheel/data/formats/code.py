"""The reader of source trees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from tidewheel.data.quarantine import Bad
from tidewheel.data.reader import Reader, SourceBytes
from tidewheel.data.readers import code
from tidewheel.data.readers.record import RECORDS, Record
from tidewheel.versions import Version


class SourceCode(Reader):
    """Reader of source code: each file is a record with path and language. Its settings are `read.code`.

    Vendored and generated files, and files that are not code, are skipped and counted.
    """

    VERSION: ClassVar[Version | None] = Version("read_code", uses=(RECORDS,))
    TREE: ClassVar[bool] = True

    def read(self, source: SourceBytes) -> Iterator[Record | Bad | code.Skipped]:
        """Yield the records of a bundle of files, and the files that are skipped."""
        return code.records(source.store, source.members, source.config)
