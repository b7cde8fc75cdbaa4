"""Recognise the format of a file by its first bytes. Its name is only a hint.

Readers recognise their own files (`Reader.SIGNATURES`, `ENDINGS`, `trusts_name`, `recognise`); this module asks them in
order and names none of them. A file that no reader supports is reported as what it is (`foreign`).
"""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tidewheel.data.compression import DAMAGE, packing_of, unpacked_name
from tidewheel.data.config import ReadConfig
from tidewheel.data.reader import AUTO, READERS, FileHead, FileMatch, Reader
from tidewheel.data.readers import foreign
from tidewheel.data.readers.packed import Recoded, UnreadableFile, encoding_of, file_errors, opened
from tidewheel.errors import ConfigError
from tidewheel.parts import is_own, name_of, source_hash
from tidewheel.storage import Store

logger = logging.getLogger(__name__)
HEAD_BYTES = 64 << 10
_READ_BYTES = 4096


@dataclass(frozen=True)
class Shape:
    """The recognised format of a file.

    Args:
        format: name of the format's reader.
        packing: "gzip", "zstd" or "".
        encoding: "utf-16-le", "utf-16-be", or "" for UTF-8 and for anything that is not text.
        delimiter: what separates the fields of a table, else "".
        problem: what the file is instead, if it cannot be read, else "".
        hint: how to fix the problem.
    """

    format: str
    packing: str = ""
    encoding: str = ""
    delimiter: str = ""
    problem: str = ""
    hint: str = ""

    @property
    def is_seekable(self) -> bool:
        """True if reading may begin in the middle."""
        return not self.packing and not self.encoding

    def __str__(self) -> str:
        """Return the shape for display: "csv, gzip, utf-16", or what the file is instead."""
        if self.problem:
            return self.problem
        encoding = self.encoding and "utf-16"
        return ", ".join(part for part in (self.format, self.packing, encoding) if part)


def format_of_name(key: str, config: ReadConfig) -> str:
    """Return the format that the settings or the file's name give; "" if neither gives one."""
    if config.format != AUTO:
        return config.format_name
    name = unpacked_name(key)
    return next((kind for kind, endings in endings().items() if name.endswith(endings)), "")


def endings() -> dict[str, tuple[str, ...]]:
    """Return the endings of file names of each format, before the ending of a compression."""
    return {kind: reader.ENDINGS for kind, reader in sorted(_readers().items()) if reader.ENDINGS}


def fallback() -> str:
    """Return the name of the format that a file has if no reader recognises it."""
    return next(kind for kind, reader in _readers().items() if reader.FALLBACK)


def installed_sources(config: ReadConfig) -> dict[str, str]:
    """Return {name: hash of the source} of the readers outside this package that may be chosen by content."""
    if config.format != AUTO:
        return {}
    return {kind: source_hash(reader) for kind, reader in sorted(_readers().items()) if is_own(kind)}


def shape_of(store: Store, key: str, config: ReadConfig) -> Shape:
    """Return the format of the file `key`: a function of its first `HEAD_BYTES`, its name and the settings.

    Args:
        store: the store of the file.
        key: its key there.
        config: the settings of `read`.

    Raises:
        UnreadableFile: the beginning of the file cannot be read.
        InputError, StorageError: the file is missing, or its storage fails.
    """
    with file_errors(store, key), store.open(key) as stream:
        raw = stream.read(HEAD_BYTES)
    named = format_of_name(key, config)
    packing = packing_of(key, raw)
    if config.format != AUTO and is_own(named):
        return Shape(named, packing)
    readers = _readers()
    named_reader = readers.get(named)
    if kind := _signed(raw, readers, named_reader):
        return _checked(Shape(kind), config)
    head, encoding = raw, ""
    if packing or named_reader is None or not named_reader.BINARY:
        head, encoding = _unpacked_head(store, key, raw, packing)
    default = named or fallback()
    if problem := foreign.binary_problem(head) or (None if packing else foreign.binary_problem(raw)):
        return Shape(default, packing, "", "", *problem)
    beginning = FileHead(head, packing, encoding, named, named_reader is not None and named_reader.BINARY,
                     len(head) < HEAD_BYTES, config)
    kind, match = _match(beginning, readers, default)
    return _checked(Shape(kind, packing, encoding, match.delimiter, match.problem, match.hint), config)


def _signed(raw: bytes, readers: dict[str, type[Reader]], named: type[Reader] | None) -> str:
    """Return the format whose signature the stored bytes begin with; "" if there is none."""
    for kind, reader in readers.items():
        if raw.startswith(reader.SIGNATURES):
            return kind
    if named is not None and named.KEEPS_NAME:
        return ""
    return next((kind for kind, reader in readers.items() if raw.startswith(reader.WEAK_SIGNATURES)), "")


def _match(head: FileHead, readers: dict[str, type[Reader]], default: str) -> tuple[str, FileMatch]:
    """Return the format of a file and its reader's match.

    Args:
        head: the beginning of the file.
        readers: all readers, in the order in which they are asked.
        default: the format if no reader recognises the file.
    """
    named = readers.get(head.named)
    if named is not None and named.trusts_name(head):
        return head.named, FileMatch()
    if named is not None and head.config.format != AUTO and (match := named.recognise(head)) is not None:
        return head.named, match
    binary = [reader for reader in readers.values() if reader.BINARY]
    if head.packing and any(head.data.startswith(reader.SIGNATURES) for reader in binary):
        return default, FileMatch(problem=f"a columnar file packed with {head.packing}", hint="unpack it")
    for kind, reader in readers.items():
        if (match := reader.recognise(head)) is not None:
            return kind, match
    if problem := foreign.markup_problem(head.text):
        return default, FileMatch("", *problem)
    return default, FileMatch()


def _checked(shape: Shape, config: ReadConfig) -> Shape:
    """Return the shape, with a problem if `read.format` and the content disagree."""
    if shape.problem or config.format_name in (AUTO, shape.format):
        return shape
    if shape.format == fallback():  # any content may be a damaged line
        return Shape(config.format_name, shape.packing, shape.encoding)
    return Shape(config.format_name, shape.packing, shape.encoding, "",
                 f"{_readers()[shape.format].SHOWN}, where read.format says {config.format_name}",
                 "leave out read.format: the content decides then")


def _unpacked_head(store: Store, key: str, raw: bytes, packing: str) -> tuple[bytes, str]:
    """Return (the first bytes, decompressed and in UTF-8; their original encoding).

    A damaged file gives fewer bytes; its reader reports the damage.
    """
    if not packing and not encoding_of(raw):
        return raw, ""
    head = b""
    encoding = ""
    try:
        with opened(store, key) as stream:
            if isinstance(stream, io.BufferedReader) and isinstance(stream.raw, Recoded):
                encoding = stream.raw.encoding
            while len(head) < HEAD_BYTES and (more := stream.read(_READ_BYTES)):
                head += more
    except (UnreadableFile, EOFError, *DAMAGE):
        return head, encoding
    return head, encoding


def _readers() -> dict[str, type[Reader]]:
    """Return all readers that `read.format: auto` may choose, in the order in which they are asked."""
    return _ordered(READERS.names())


@lru_cache(maxsize=8)
def _ordered(names: tuple[str, ...]) -> dict[str, type[Reader]]:
    usable: list[type[Reader]] = []
    for name in names:
        try:
            reader = READERS.find(name)
        except ConfigError as error:
            logger.warning("read.format: auto skips the reader %s of an installed package: %s", name, error)
            continue
        if not any(field.is_required() for field in reader.model_fields.values()):
            usable.append(reader)
    usable.sort(key=lambda reader: (reader.ORDER, name_of(reader)))
    return {name_of(reader): reader for reader in usable}


def values_of(shape: Shape) -> list[str]:
    """Return a shape as a list of values, for the inputs of a task."""
    return [shape.format, shape.packing, shape.encoding, shape.delimiter, shape.problem, shape.hint]


def shape_from(values: list[Any]) -> Shape:
    """Return the shape whose `values_of` are given."""
    return Shape(*values)
