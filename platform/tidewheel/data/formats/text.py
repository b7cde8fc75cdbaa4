"""The reader of text files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from tidewheel.data.quarantine import Bad
from tidewheel.data.reader import FileHead, Reader, SourceBytes
from tidewheel.data.readers import trees
from tidewheel.data.readers.record import RECORDS, Record
from tidewheel.versions import Version


class Text(Reader):
    """Reader of text files: each file is a document. Its path is the id, its folder the source."""

    VERSION: ClassVar[Version | None] = Version("read_text", uses=(RECORDS,))
    ENDINGS: ClassVar[tuple[str, ...]] = (".txt", ".text", ".md", ".markdown", ".rst")
    KEEPS_NAME: ClassVar[bool] = True
    SHOWN: ClassVar[str] = "a text file"

    @classmethod
    def trusts_name(cls, head: FileHead) -> bool:
        """Return True: any content is valid text."""
        return True

    def read(self, source: SourceBytes) -> Iterator[Record | Bad]:
        """Yield the records of a file."""
        return trees.records(source.store, source.key, source.config, source.name)
