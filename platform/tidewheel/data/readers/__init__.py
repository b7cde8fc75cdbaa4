"""From the bytes of a source file to documents, and to bad records with their place and reason.

`sniff` tells which format it is, and its reader (`reader`, `formats`) reads it with the module here that has its code:
`lines` (JSONL), `json_values`, `tables` (CSV, TSV), `columns` (Parquet, Arrow), `trees` (text files), `code`, `web`
(WARC and WET). What they give is a function of the file's bytes, its name and the settings, and so are the ranges it
can be cut into.
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
    shape = shape or shape_of(place, key, config)
    if shape.problem:
        raise UnreadableFile(f"{shape.problem}: {shape.hint}")
    source = SourceBytes(place, key, name or key, config, shape, span)
    found: Iterator[Record | Bad] = reader_of(shape.format, config).read(source)  # type: ignore[assignment]
    return found


def read_bundle(place: Store, members: Sequence[tuple[str, str]], config: ReadConfig, shape: Shape
                ) -> Iterator[Record | Bad | Skipped]:
    """The records of the files (key, name) of a bundle, of a reader with `TREE`."""
    source = SourceBytes(place, "", "", config, shape, members=tuple((key, name) for key, name in members))
    return reader_of(shape.format, config).read(source)


def ranges(place: Store, key: str, size: int, config: ReadConfig, shape: Shape | None = None
           ) -> list[tuple[int, int]]:
    """Ranges [first, last) that a file of `size` bytes is cut into, as its reader counts them.

    [] when it stays whole, because it is not larger than `unit_bytes` or can only be read from its beginning.
    """
    if size <= config.unit_bytes:
        return []
    shape = shape or shape_of(place, key, config)
    if shape.problem:
        return []
    return reader_of(shape.format, config).ranges(SourceBytes(place, key, key, config, shape), size)


def check_installed(shapes: Iterable[Shape], config: ReadConfig) -> None:
    """InputError when a package is missing that a file of one of these shapes needs."""
    for name in sorted({shape.format for shape in shapes}):
        reader_of(name, config).check_installed()


def is_empty(place: Store, key: str, config: ReadConfig, shape: Shape) -> bool:
    """True when a file whose first range holds no record holds none at all."""
    return reader_of(shape.format, config).is_empty(SourceBytes(place, key, key, config, shape))
