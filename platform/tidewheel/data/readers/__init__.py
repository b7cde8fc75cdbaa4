"""Read source files: their bytes become records, and bad records with their location and reason.

`sniff` finds the reader of a file (`reader`, `formats`). The modules here hold the readers' code: `lines` (JSONL),
`json_values`, `tables` (CSV, TSV), `columns` (Parquet, Arrow), `trees` (text files), `code`, `web` (WARC and WET). The
records, and the ranges that a file is cut into, are a function of the file's bytes, its name and the settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tidewheel.data.config import ReadConfig
from tidewheel.data.quarantine import Bad
from tidewheel.data.reader import SourceBytes, reader_of
from tidewheel.data.readers.code import Skipped
from tidewheel.data.readers.packed import UnreadableFile
from tidewheel.data.readers.record import Record
from tidewheel.data.readers.sniff import Shape, fallback, shape_of
from tidewheel.storage import Store

__all__ = ["Record", "Shape", "UnreadableFile", "check_installed", "fallback", "is_empty", "ranges", "read_bundle",
           "read_records", "shape_of"]


def read_records(store: Store, key: str, config: ReadConfig, *, name: str | None = None,
                 span: tuple[int, int] | None = None, shape: Shape | None = None) -> Iterator[Record | Bad]:
    """Return the records of the file `key`, in order.

    Args:
        store: the store of the file.
        key: its key there.
        config: the settings of `read`.
        name: what quarantine calls the file; also the default source of its documents. By default `key`.
        span: one of its `ranges`; by default the whole file.
        shape: what `shape_of` returned for the file; by default it is called.

    Raises:
        UnreadableFile: the file cannot be read as a whole. Discard the records read before.
        InputError, StorageError: the file is missing, or its storage fails; its content is not the cause.
    """
    shape = shape or shape_of(store, key, config)
    if shape.problem:
        raise UnreadableFile(f"{shape.problem}: {shape.hint}")
    source = SourceBytes(store, key, name or key, config, shape, span)
    records: Iterator[Record | Bad] = reader_of(shape.format, config).read(source)  # type: ignore[assignment]
    return records


def read_bundle(store: Store, members: Sequence[tuple[str, str]], config: ReadConfig, shape: Shape
                ) -> Iterator[Record | Bad | Skipped]:
    """Return the records of a bundle of files.

    Args:
        store: the store of the files.
        members: (key, name) of each file.
        config: the settings of `read`.
        shape: what `shape_of` returned for all of the files; its reader has `TREE`.
    """
    source = SourceBytes(store, "", "", config, shape, members=tuple((key, name) for key, name in members))
    return reader_of(shape.format, config).read(source)


def ranges(store: Store, key: str, size: int, config: ReadConfig, shape: Shape | None = None
           ) -> list[tuple[int, int]]:
    """Return the ranges [first, last) that a file is cut into, as its reader counts them.

    The list is empty if the file stays whole: it is not larger than `unit_bytes`, or it can only be read from its
    beginning.

    Args:
        store: the store of the file.
        key: its key there.
        size: its length in bytes.
        config: the settings of `read`.
        shape: what `shape_of` returned for the file; by default it is called.
    """
    if size <= config.unit_bytes:
        return []
    shape = shape or shape_of(store, key, config)
    if shape.problem:
        return []
    return reader_of(shape.format, config).ranges(SourceBytes(store, key, key, config, shape), size)


def check_installed(shapes: Iterable[Shape], config: ReadConfig) -> None:
    """Check that the packages needed to read files of these shapes are installed.

    Raises:
        InputError: a package is missing.
    """
    for name in sorted({shape.format for shape in shapes}):
        reader_of(name, config).check_installed()


def is_empty(store: Store, key: str, config: ReadConfig, shape: Shape) -> bool:
    """Return whether a file whose first range has no record has none at all.

    Args:
        store: the store of the file.
        key: its key there.
        config: the settings of `read`.
        shape: what `shape_of` returned for the file.
    """
    return reader_of(shape.format, config).is_empty(SourceBytes(store, key, key, config, shape))
