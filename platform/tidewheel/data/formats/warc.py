"""The reader of web archives, WARC and WET."""

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
    """Reader of web archives: each page is a record with its id, url, host, date and main text."""

    VERSION: ClassVar[Version | None] = Version("read_warc", uses=(RECORDS,))
    ENDINGS: ClassVar[tuple[str, ...]] = (".warc", ".wet")
    ORDER: ClassVar[int] = 10
    SHOWN: ClassVar[str] = "a web archive"

    @classmethod
    def trusts_name(cls, head: FileHead) -> bool:
        """Return whether the file may be an archive, perhaps a damaged one: it does not begin with a JSON object."""
        return not head.data.startswith(b"{")

    @classmethod
    def recognise(cls, head: FileHead) -> FileMatch | None:
        """Return a match if the file begins with an archive record."""
        return FileMatch() if head.data.startswith(b"WARC/") else None

    def read(self, source: SourceBytes) -> Iterator[Record | Bad]:
        """Yield the records of a file."""
        return web.records(source.store, source.key, source.config, source.name)

    def packages(self) -> list[str]:
        """Return the versions of the packages that extract the main text."""
        return [f"{name} {importlib.metadata.version(name)}" for name in web.PACKAGES]

    def check_installed(self) -> None:
        """Check that the packages for web archives are installed.

        Raises:
            InputError: a package is missing.
        """
        web.check_installed()
