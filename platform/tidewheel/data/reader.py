"""`Reader`, the base of all readers: a part that turns the bytes of a file into records.

    class Games(tw.Reader):
        "Chess games in PGN, a game a record."

        def records(self, stream):
            for number, game in enumerate(split(stream.read())):
                yield {"id": f"game-{number}", "text": game}

A recipe names it under `read`: `format: "my_readers:Games"`, with settings `format: {kind: "my_readers:Games", moves:
40}`. `format: auto` also chooses the reader of an installed package (an entry point of the group `tidewheel.readers`)
that says how its files are recognised: by `ENDINGS`, `SIGNATURES` or `recognise`. The built-in readers are the modules
of `tidewheel.data.formats`.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

from tidewheel.errors import InputError, TidewheelError
from tidewheel.parts import KIND, Kind, Part, is_own, name_of, source_hash

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
        store: store that holds the file.
        key: key of the file.
        name: name of the file in quarantine, and its default source.
        config: settings of `read`.
        shape: format of the file, from its first bytes.
        span: one of `Reader.ranges`; None for the whole file.
        members: (key, name) of the files of a bundle, for a reader with `TREE`.
    """

    store: Store
    key: str
    name: str
    config: ReadConfig
    shape: Shape
    span: tuple[int, int] | None = None
    members: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class FileHead:
    """The beginning of a source file, by which readers recognise it.

    Args:
        data: the first 64 KiB, decompressed, in UTF-8 if the file is UTF-16; fewer bytes if the file is damaged.
        packing: compression of the stored file: "gzip", "zstd" or "".
        encoding: "utf-16-le", "utf-16-be" or "".
        named: the format that `read.format` or the file's name gives; "" if neither gives one.
        is_named_binary: whether that format is a `BINARY` one.
        is_whole: whether `data` is the whole file.
        config: the settings of `read`.
    """

    data: bytes
    packing: str
    encoding: str
    named: str
    is_named_binary: bool
    is_whole: bool
    config: ReadConfig

    @cached_property
    def text(self) -> bytes:
        """`data` without a byte order mark and without white space before the first character."""
        return self.data.removeprefix(b"\xef\xbb\xbf").lstrip()

    @property
    def may_be_any_text(self) -> bool:
        """True if the content alone decides which text format the file has."""
        return self.config.format == AUTO and not self.is_named_binary


@dataclass(frozen=True)
class FileMatch:
    """What a reader says of a file that it recognises.

    Args:
        delimiter: what separates the fields of a table; `SourceBytes.shape` passes it on to `Reader.read`.
        problem: why the file cannot be read all the same: "CSV without a column 'text'"; "" if it can be.
        hint: what to do about the problem.
    """

    delimiter: str = ""
    problem: str = ""
    hint: str = ""


class Reader(Part):
    """Base of a reader: its fields are its settings. Its records depend only on the bytes and the settings."""

    ENDINGS: ClassVar[tuple[str, ...]] = ()
    """Endings of the names of such files, without the ending of a compression."""
    SIGNATURES: ClassVar[tuple[bytes, ...]] = ()
    """First bytes of its files. They decide, whatever the file's name says."""
    WEAK_SIGNATURES: ClassVar[tuple[bytes, ...]] = ()
    """First bytes of its files that decide unless the name is of a format with `KEEPS_NAME`."""
    KEEPS_NAME: ClassVar[bool] = False
    """A file that is named as this format is one, even if it begins with another format's weak signature."""
    BINARY: ClassVar[bool] = False
    """Its files are no text and are read in place, so they cannot be packed with gzip or zstd."""
    FALLBACK: ClassVar[bool] = False
    """It reads the files that no reader recognises. One built-in reader does."""
    ORDER: ClassVar[int] = 0
    """Readers with a smaller number are asked first whether a file is theirs."""
    SHOWN: ClassVar[str] = ""
    """Name of the format in messages."""
    RANGES: ClassVar[str] = "bytes"
    """Unit of `ranges`."""
    TREE: ClassVar[bool] = False
    """Whether its files are a tree of many small files, which is read in bundles."""

    @classmethod
    def trusts_name(cls, head: FileHead) -> bool:
        """Return whether a file that `read.format` or its name gives this format has it, whatever it begins with."""
        return False

    @classmethod
    def recognise(cls, head: FileHead) -> FileMatch | None:
        """Return a match if the file has this format, else None. By default `SIGNATURES` decide.

        A file that begins with `SIGNATURES` as it is stored is recognised before this is asked.
        """
        return FileMatch() if head.data.startswith(cls.SIGNATURES) and not cls.BINARY else None

    def records(self, stream: BinaryIO) -> Iterator[Mapping[str, object]]:
        """Yield the fields of each record of a file as JSON values; the settings of `read` name those of a document.

        Args:
            stream: the file's bytes; gzip and zstd are decompressed.

        Raises:
            ValueError: the file is damaged. It goes to quarantine as a whole.
        """
        raise NotImplementedError

    def read(self, source: SourceBytes) -> Iterator[Record | Bad | Skipped]:
        """Yield the records of a file, in order.

        Raises:
            UnreadableFile: the file cannot be read or trusted as a whole; records read so far do not count.
            InputError: `records` raised an unexpected error.
        """
        from tidewheel.data.readers.packed import UnreadableFile, unpacked
        from tidewheel.data.readers.record import Location, record

        with unpacked(source.store, source.key) as stream:
            records = iter(self.records(stream))
            number = 0
            while True:
                try:
                    values = next(records, None)
                    if values is None:
                        return
                    if not isinstance(values, Mapping):
                        raise TypeError(f"records yielded {type(values).__name__}, which is not a mapping of fields")
                    row = record(dict(values), source.config, Location(source.name, 0, number), b"")
                except (TidewheelError, OSError, EOFError, MemoryError):
                    raise
                except ValueError as error:
                    raise UnreadableFile(str(error)) from None
                except Exception as error:
                    raise _failed(self, error) from error
                yield row
                number += 1

    def ranges(self, source: SourceBytes, size: int) -> list[tuple[int, int]]:
        """Return the ranges [first, last) in which a file of `size` bytes is read; [] to read it as a whole."""
        return []

    def is_empty(self, source: SourceBytes) -> bool:
        """Return whether a file whose first range has no record has none at all."""
        return next(iter(self.read(source)), None) is None

    def packages(self) -> list[str]:
        """Return the versions of packages that decide its records, for unit keys."""
        return []

    def check_installed(self) -> None:
        """Check the packages that it needs.

        Raises:
            InputError: a package is missing.
        """


READERS = Kind("reader", Reader, "tidewheel.data.formats", "tidewheel.readers")


def _failed(reader: Reader, error: Exception) -> InputError:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    name = name_of(type(reader))
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else name
    return InputError(f"the reader {name} failed: {type(error).__name__}: {error}", where=where,
                      fix="correct the reader and run again; what is finished stays")


def identities(reader: Reader, config: ReadConfig) -> list[str]:
    """Return what the keys of a reader's units hold beside settings and versions: packages, and the source of code that
    is outside this package and that the settings do not name."""
    if is_own(name_of(type(reader))) and not isinstance(config.format, Reader):
        return [*reader.packages(), source_hash(type(reader))]
    return reader.packages()


def chosen(value: Any) -> Any:
    """Return the value of `read.format`: "auto", the name of a built-in reader, or an instance of another reader.

    Raises:
        ConfigError: there is no such reader.
        pydantic.ValidationError: one of its settings is invalid.
    """
    if isinstance(value, Mapping):
        settings = {key: setting for key, setting in value.items() if key != KIND}
        name = str(value.get(KIND, ""))
        return READERS.build(name, settings) if settings or name not in READERS.built_in() else name
    if not isinstance(value, str) or value == AUTO or value in READERS.built_in():
        return value
    return READERS.build(value)


def reader_of(name: str, config: ReadConfig) -> Reader:
    """Return the reader of a format (`Shape.format`)."""
    if isinstance(config.format, Reader) and is_own(name):
        return config.format
    return READERS.build(name)


def version_of(reader: Reader) -> Version:
    """Return the version of a reader's records."""
    if reader.VERSION is not None:
        return reader.VERSION
    from tidewheel.data.readers.record import OWN_READERS

    return OWN_READERS
