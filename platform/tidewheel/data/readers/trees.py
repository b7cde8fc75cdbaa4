"""Trees of text files: a file is a document, its path below the input its id, its folder its source."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

from tidewheel.data.config import ReadConfig
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers.packed import opened
from tidewheel.data.readers.record import Place, Record, record
from tidewheel.storage import Store


def records(place: Store, key: str, config: ReadConfig, name: str) -> Iterator[Record | Bad]:
    """The file as one record with the fields `id` (its path), `source` (its folder, "." at the top), and the text."""
    limit = config.max_record_bytes
    here = Place(name, 1, 0)
    with opened(place, key) as stream:
        try:
            data = stream.read(limit + 1)
        except EOFError:
            yield here.bad("truncated_file", b"", "the compressed data end too early")
            return
    if not data:
        return
    if len(data) > limit:
        yield here.bad("record_too_long", data[:limit], f"more than {limit} bytes")
        return
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield here.bad("wrong_encoding", data, f"byte {error.start}: {error.reason}")
        return
    values = {"id": name, "source": posixpath.dirname(name) or ".", config.text_name: text}
    yield record(values, config, here, data)
