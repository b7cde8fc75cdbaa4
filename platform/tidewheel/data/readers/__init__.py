"""From the bytes of a source file to documents, and to bad records with their place and reason.

A format is one module: `lines` (JSONL), `columns` (Parquet, Arrow), `trees` (a text file is a document), `web` (WARC
and WET). What they give is a function of the file's bytes and the settings, and so are the ranges it can be cut into.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
from collections.abc import Iterator, Sequence

from tidewheel.data.config import ReadConfig
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers import columns, lines, trees, web
from tidewheel.data.readers.packed import UnreadableFile, is_packed, opened, unpacked_name
from tidewheel.data.readers.record import Record
from tidewheel.storage import Store

__all__ = ["ENDINGS", "MODULES", "Record", "UnreadableFile", "check_installed", "format_of", "is_empty", "ranges",
           "read_records", "versions"]

MODULES = tuple(f"tidewheel.data.readers{name}" for name in ("", ".columns", ".columns_size", ".lines", ".packed",
                                                            ".record", ".trees", ".web"))
"""Whose code decides what a file holds."""
ENDINGS = {
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".arrows", ".feather", ".ipc"),
    "text": (".txt", ".text", ".md", ".markdown", ".rst"),
    "warc": (".warc", ".wet"),
}
"""Endings of each format, before that of a compression; files with others are taken for JSONL."""


def format_of(key: str, config: ReadConfig) -> str:
    """"jsonl", "parquet", "arrow", "text" or "warc": what the settings say, or the ending of `key`."""
    if config.format != "auto":
        return config.format
    name = unpacked_name(key)
    return next((kind for kind, endings in ENDINGS.items() if name.endswith(endings)), "jsonl")


def read_records(place: Store, key: str, config: ReadConfig, *, name: str | None = None,
                 span: tuple[int, int] | None = None) -> Iterator[Record | Bad]:
    """The records of the file `key`, in order.

    Args:
        place: where the file is.
        key: its key; the ending decides how it is unpacked and, with `format: auto`, what it is.
        config: which field is what.
        name: what the file is called in quarantine and as default source; `key` if not given.
        span: one of its `ranges`; the whole file if not given.

    Raises:
        UnreadableFile: it cannot be trusted or read as a whole. Records read before do not count.
        InputError, StorageError: it is not there, or its storage fails: nothing the file's content is to blame for.
    """
    name = name or key
    kind = format_of(key, config)
    if kind == "jsonl":
        return lines.records(place, key, config, name, span)
    if kind == "text":
        return trees.records(place, key, config, name)
    if kind == "warc":
        return web.records(place, key, config, name)
    return columns.records(place, key, kind, config, name, span)


def ranges(place: Store, key: str, size: int, config: ReadConfig) -> list[tuple[int, int]]:
    """Ranges [first, last) that a file of `size` bytes is cut into: bytes of plain JSONL, row groups of Parquet.

    [] when it stays whole, because it is not larger than `unit_bytes` or can only be read from its beginning.
    """
    kind = format_of(key, config)
    if size <= config.unit_bytes:
        return []
    if kind == "parquet":
        found = columns.row_groups(place, key, config.unit_bytes)
        return found if len(found) > 1 else []
    if kind == "jsonl" and not is_packed(key):
        return list(itertools.pairwise([*range(0, size, config.unit_bytes), size]))
    return []


def versions(key: str, config: ReadConfig) -> list[str]:
    """Versions of the packages that decide what is read from this file, for the keys of units."""
    if format_of(key, config) != "warc":
        return []
    return [f"{name} {importlib.metadata.version(name)}" for name in web.PACKAGES]


def check_installed(keys: Sequence[str], config: ReadConfig) -> None:
    """InputError when a package is missing that one of these files needs."""
    wanted = any(format_of(key, config) == "warc" for key in keys)
    if wanted and not all(importlib.util.find_spec(name) for name in web.PACKAGES):
        raise web.missing()


def is_empty(place: Store, key: str, config: ReadConfig) -> bool:
    """True when a file whose first range holds no record holds none at all."""
    if format_of(key, config) != "jsonl":
        return next(iter(read_records(place, key, config)), None) is None
    with opened(place, key) as stream:
        return lines.is_blank(stream)
