"""From the bytes of a source file to documents, and to bad records with their place and reason.

A format is one module: `lines` (JSONL), `json_values` (JSON arrays), `tables` (CSV, TSV), `columns` (Parquet, Arrow),
`trees` (a text file is a document), `code` (a source file is), `web` (WARC and WET); `sniff` tells which it is. What
they give is a function of the file's bytes, its name and the settings, and so are the ranges it can be cut into.
"""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Iterable, Iterator

from tidewheel.data.config import ReadConfig
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers import columns, json_values, lines, tables, trees, web
from tidewheel.data.readers.packed import UnreadableFile, opened
from tidewheel.data.readers.record import Record
from tidewheel.data.readers.sniff import Shape, shape_of
from tidewheel.storage import Store
from tidewheel.versions import Version

__all__ = ["FORMATS", "Record", "Shape", "UnreadableFile", "check_installed", "is_empty", "ranges", "read_records",
           "shape_of", "version", "versions"]


RECORDS = Version("records")
"""How a file is unpacked, its format is recognised, and fields become a document or a bad record."""
FORMATS = {"jsonl": 1, "json": 1, "csv": 1, "tsv": 1, "text": 1, "parquet": 1, "arrow": 1, "warc": 1, "code": 1}
"""The version of each format's reader."""


def read_records(place: Store, key: str, config: ReadConfig, *, name: str | None = None,
                 span: tuple[int, int] | None = None, shape: Shape | None = None) -> Iterator[Record | Bad]:
    """The records of the file `key`, in order.

    Args:
        place: where the file is.
        key: its key.
        config: which field is what.
        name: what the file is called in quarantine and as default source; `key` if not given.
        span: one of its `ranges`; the whole file if not given.
        shape: what `shape_of` gave for the file, if somebody has looked already.

    Raises:
        UnreadableFile: it cannot be trusted or read as a whole. Records read before do not count.
        InputError, StorageError: it is not there, or its storage fails: nothing the file's content is to blame for.
    """
    name = name or key
    shape = shape or shape_of(place, key, config)
    if shape.problem:
        raise UnreadableFile(f"{shape.problem}: {shape.hint}")
    if shape.format == "jsonl":
        return lines.records(place, key, config, name, span)
    if shape.format == "json":
        return json_values.records(place, key, config, name)
    if shape.format in ("csv", "tsv"):
        return tables.records(place, key, config, name, shape.delimiter)
    if shape.format == "text":
        return trees.records(place, key, config, name)
    if shape.format == "warc":
        return web.records(place, key, config, name)
    return columns.records(place, key, shape.format, config, name, span)


def ranges(place: Store, key: str, size: int, config: ReadConfig, shape: Shape | None = None
           ) -> list[tuple[int, int]]:
    """Ranges [first, last) that a file of `size` bytes is cut into: bytes of plain JSONL, row groups of Parquet.

    [] when it stays whole, because it is not larger than `unit_bytes` or can only be read from its beginning.
    """
    if size <= config.unit_bytes:
        return []
    shape = shape or shape_of(place, key, config)
    if shape.problem:
        return []
    if shape.format == "parquet":
        found = columns.row_groups(place, key, config.unit_bytes)
        return found if len(found) > 1 else []
    if shape.format == "jsonl" and shape.is_seekable:
        return list(itertools.pairwise([*range(0, size, config.unit_bytes), size]))
    return []


def version(kind: str) -> Version:
    """Return the version of what is read from files of a format."""
    return Version(f"read_{kind}", FORMATS[kind], uses=(RECORDS,))


def versions(shape: Shape) -> list[str]:
    """Versions of the packages that decide what is read from a file, for the keys of units."""
    if shape.format != "warc":
        return []
    return [f"{name} {importlib.metadata.version(name)}" for name in web.PACKAGES]


def check_installed(shapes: Iterable[Shape]) -> None:
    """InputError when a package is missing that a file of one of these shapes needs."""
    if any(shape.format == "warc" for shape in shapes):
        web.check_installed()


def is_empty(place: Store, key: str, config: ReadConfig, shape: Shape) -> bool:
    """True when a file whose first range holds no record holds none at all."""
    if shape.format != "jsonl":
        return next(iter(read_records(place, key, config, shape=shape)), None) is None
    with opened(place, key) as stream:
        return lines.is_blank(stream)
