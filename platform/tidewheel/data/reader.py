"""Readers: from the bytes of a file to records. They are parts; here is what one is.

    class Games(tw.Reader):
        "Chess games in PGN, a game a record."

        def records(self, stream):
            for number, game in enumerate(split(stream.read())):
                yield {"id": f"game-{number}", "text": game}

A recipe names it under `read`: `format: "my_readers:Games"`, with settings `format: {kind: "my_readers:Games", moves:
40}`. The built-in ones are the modules of `tidewheel.data.formats`.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

from tidewheel.errors import InputError, TidewheelError
from tidewheel.parts import KIND, Kind, Part, is_own, name_of

if TYPE_CHECKING:
    from tidewheel.data.quarantine import Bad
    from tidewheel.data.read_config import ReadConfig
    from tidewheel.data.readers.code import Skipped
    from tidewheel.data.readers.record import Record
    from tidewheel.data.readers.sniff import Shape
    from tidewheel.storage import Store
    from tidewheel.versions import Version

AUTO = "auto"


@dataclass(frozen=True)
class SourceBytes:
    """A file to read.

    Args:
        place: where it is.
        key: its key.
        name: what it is called in quarantine, and as default source.
        config: which field is what.
        shape: what its first bytes say.
        span: one of `Reader.ranges`; None for the whole file.
        members: (key, name) of the files of a bundle, for a reader with `TREE`.
    """

    place: Store
    key: str
    name: str
    config: ReadConfig
    shape: Shape
    span: tuple[int, int] | None = None
    members: tuple[tuple[str, str], ...] = ()


class Reader(Part):
    """Base of a reader: its fields are its settings. What it gives is a function of the bytes and the settings."""

    ENDINGS: ClassVar[tuple[str, ...]] = ()
    """Endings of file names, before that of a compression, that say it is this format."""
    SHOWN: ClassVar[str] = ""
    """What a file of this format is called in messages."""
    RANGES: ClassVar[str] = "bytes"
    """What `ranges` counts."""
    TREE: ClassVar[bool] = False
    """Its files are a tree: many small ones, read in bundles."""

    def records(self, stream: BinaryIO) -> Iterator[Mapping[str, object]]:
        """Yield the fields of each record of a file, JSON values; those that `read` names make the document.

        Args:
            stream: the file's bytes, unpacked if it is packed with gzip or zstd.

        Raises:
            ValueError: the file is damaged. It goes to quarantine as a whole.
        """
        raise NotImplementedError

    def read(self, source: SourceBytes) -> Iterator[Record | Bad | Skipped]:
        """Yield the records of a file, in order.

        Raises:
            UnreadableFile: it cannot be trusted or read as a whole. Records read before do not count.
            InputError: `records` raised an error of its own.
        """
        from tidewheel.data.readers.packed import UnreadableFile, unpacked
        from tidewheel.data.readers.record import Place, record

        with unpacked(source.place, source.key) as stream:
            found = iter(self.records(stream))
            number = 0
            while True:
                try:
                    values = next(found, None)
                    if values is None:
                        return
                    if not isinstance(values, Mapping):
                        raise TypeError(f"records yielded {type(values).__name__}, which is no mapping of fields")
                    made = record(dict(values), source.config, Place(source.name, 0, number), b"")
                except (TidewheelError, OSError, EOFError, MemoryError):
                    raise
                except ValueError as error:
                    raise UnreadableFile(str(error)) from None
                except Exception as error:
                    raise _failed(self, error) from error
                yield made
                number += 1

    def ranges(self, source: SourceBytes, size: int) -> list[tuple[int, int]]:
        """Return the ranges [first, last) that a file of `size` bytes is cut into; [] if it stays whole."""
        return []

    def is_empty(self, source: SourceBytes) -> bool:
        """Return whether a file whose first range holds no record holds none at all."""
        return next(iter(self.read(source)), None) is None

    def packages(self) -> list[str]:
        """Return the versions of packages that decide what is read, for the keys of units."""
        return []

    def check_installed(self) -> None:
        """Raise InputError when a package that it needs is missing."""


READERS = Kind("reader", Reader, "tidewheel.data.formats", "tidewheel.readers")


def _failed(reader: Reader, error: Exception) -> InputError:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    name = name_of(type(reader))
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else name
    return InputError(f"the reader {name} failed: {type(error).__name__}: {error}", where=where,
                      mend="correct the reader and run again; what is finished stays")


def chosen(value: Any) -> Any:
    """Return the value of `read.format`: "auto", the name of a built-in reader, or another reader itself.

    Raises:
        ConfigError: there is no such reader.
        pydantic.ValidationError: one of its settings is wrong.
    """
    if isinstance(value, Mapping):
        settings = {key: setting for key, setting in value.items() if key != KIND}
        name = str(value.get(KIND, ""))
        return READERS.build(name, settings) if settings or name not in READERS.built_in() else name
    if not isinstance(value, str) or value == AUTO or value in READERS.built_in():
        return value
    return READERS.build(value)


def reader_of(name: str, config: ReadConfig) -> Reader:
    """Return the reader of a format, as `Shape.format` names it."""
    if is_own(name):
        assert isinstance(config.format, Reader)
        return config.format
    return READERS.build(name)


def version_of(reader: Reader) -> Version:
    """Return the version of what a reader gives."""
    if reader.VERSION is not None:
        return reader.VERSION
    from tidewheel.data.readers.record import OWN_READERS

    return OWN_READERS
