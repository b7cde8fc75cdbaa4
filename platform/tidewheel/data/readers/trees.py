"""Read trees of text files: each file is a document. Its path below the input is the id, its folder the source."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

from tidewheel.data.config import ReadConfig
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers.packed import opened
from tidewheel.data.readers.record import Location, Record, record
from tidewheel.storage import Store


def records(store: Store, key: str, config: ReadConfig, name: str) -> Iterator[Record | Bad]:
    """Yield a file as one record with the fields `id` (its path), `source` (its folder, "." at the top) and the text.

    Args:
        store: the store of the file.
        key: its key there.
        config: the settings of `read`.
        name: its path below the input, also its name in quarantine.
    """
    limit = config.max_record_bytes
    location = Location(name, 1, 0)
    with opened(store, key) as stream:
        try:
            data = stream.read(limit + 1)
        except EOFError:
            yield location.bad("truncated_file", b"", "the compressed data end too early")
            return
    if not data:
        return
    if len(data) > limit:
        yield location.bad("record_too_long", data[:limit], f"more than {limit} bytes")
        return
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield location.bad("wrong_encoding", data, f"byte {error.start}: {error.reason}")
        return
    values = {"id": name, "source": posixpath.dirname(name) or ".", config.text_name: text}
    yield record(values, config, location, data)
