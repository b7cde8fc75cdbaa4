"""The reader of JSON files that are not JSONL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from tidewheel.data.quarantine import Bad
from tidewheel.data.reader import FileHead, FileMatch, Reader, SourceBytes
from tidewheel.data.readers import json_head, json_values
from tidewheel.data.readers.record import RECORDS, Record
from tidewheel.versions import Version


class Json(Reader):
    """Reader of JSON: the records are the objects of an array, or objects over several lines."""

    VERSION: ClassVar[Version | None] = Version("read_json", uses=(RECORDS,))
    ORDER: ClassVar[int] = 20
    SHOWN: ClassVar[str] = "JSON, an array or an object over several lines"

    @classmethod
    def recognise(cls, head: FileHead) -> FileMatch | None:
        """Return a match if the file begins with an array, or with an object over several lines."""
        is_json = json_head.is_object_over_lines(head.text) or json_head.is_array(head.text, is_whole=head.is_whole)
        return FileMatch() if is_json else None

    def read(self, source: SourceBytes) -> Iterator[Record | Bad]:
        """Yield the records of a file."""
        return json_values.records(source.store, source.key, source.config, source.name)
