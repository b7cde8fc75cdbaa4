"""Web archives: WARC and WET. A page is a document."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import ClassVar

from tidewheel.data.quarantine import Bad
from tidewheel.data.reader import FileHead, FileMatch, Reader, SourceBytes
from tidewheel.data.readers import web
from tidewheel.data.readers.record import RECORDS, Record
from tidewheel.versions import Version


class Warc(Reader):
    """A page a record, with its id, url, host and date, and the main text."""

    VERSION: ClassVar[Version | None] = Version("read_warc", uses=(RECORDS,))
    ENDINGS: ClassVar[tuple[str, ...]] = (".warc", ".wet")
    ORDER: ClassVar[int] = 10
    SHOWN: ClassVar[str] = "a web archive"

    @classmethod
    def trusts_name(cls, head: FileHead) -> bool:
        """Return whether the file may be an archive, though perhaps a damaged one: it does not begin with JSON."""
        return not head.data.startswith(b"{")

    @classmethod
    def recognise(cls, head: FileHead) -> FileMatch | None:
        """Return a match if the file begins with a record of an archive."""
        return FileMatch() if head.data.startswith(b"WARC/") else None

    def read(self, source: SourceBytes) -> Iterator[Record | Bad]:
        """Yield the records of a file."""
        return web.records(source.place, source.key, source.config, source.name)

    def packages(self) -> list[str]:
        """Return the versions of what finds the main text."""
        return [f"{name} {importlib.metadata.version(name)}" for name in web.PACKAGES]

    def check_installed(self) -> None:
        """Raise InputError when they are not there."""
        web.check_installed()
