"""Open source files: decompress them, recode UTF-16 as UTF-8, and tell damaged files from failing storage."""

from __future__ import annotations

import codecs
import contextlib
import io
from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow as pa

from tidewheel.data.compression import DAMAGE, LOOK_BYTES, decompressed_stream, first_line, packing_of
from tidewheel.errors import InputError
from tidewheel.storage import Store

_BOMS = (("", codecs.BOM_UTF32_LE), ("utf-16-le", codecs.BOM_UTF16_LE), ("utf-16-be", codecs.BOM_UTF16_BE))
_RECODE_BYTES = 64 << 10


class UnreadableFile(Exception):
    """A file that cannot be read as a whole; the message is the reason. Discard what was read of it."""


class Stream(Protocol):
    """The methods of a stream that readers call."""

    def readline(self, size: int = -1, /) -> bytes:
        """Return bytes up to and including the next newline, at most `size` of them."""

    def read(self, size: int = -1, /) -> bytes:
        """Return at most `size` bytes, all by default."""


def encoding_of(head: bytes) -> str:
    """Return the encoding of a file with these first bytes (decompressed): "utf-16-le", "utf-16-be" or "" for UTF-8.

    A byte order mark decides. Without one the zero bytes do, because JSON and tables begin with ASCII characters.
    """
    for encoding, mark in _BOMS:
        if head.startswith(mark):
            return encoding
    zeros = [byte == 0 for byte in head[:4]]
    if zeros == [False, True, False, True]:
        return "utf-16-le"
    return "utf-16-be" if zeros == [True, False, True, False] else ""


@contextlib.contextmanager
def opened(store: Store, key: str) -> Iterator[Any]:
    """Open a file as a stream of decompressed UTF-8; seekable if the file is neither packed nor in another encoding.

    Raises:
        UnreadableFile: the bytes are damaged: a checksum fails, or the file is not what its ending says.
        EOFError: raised by the stream's methods if compressed data end too early.
        InputError, StorageError: the file is missing, or its storage fails; its content is not the cause.
    """
    with file_errors(store, key), store.open(key) as stream:
        packing = packing_of(key, stream.read(LOOK_BYTES))
        encoding = _encoding(stream, packing)
        unpacked = decompressed_stream(stream, packing)
        yield io.BufferedReader(Recoded(unpacked, encoding)) if encoding else unpacked


@contextlib.contextmanager
def unpacked(store: Store, key: str) -> Iterator[Any]:
    """Open a file as a stream of decompressed bytes, in the file's own encoding. Raise the errors of `opened`."""
    with file_errors(store, key), store.open(key) as stream:
        yield decompressed_stream(stream, packing_of(key, stream.read(LOOK_BYTES)))


def _encoding(stream: Any, packing: str) -> str:
    try:
        return encoding_of(decompressed_stream(stream, packing).read(LOOK_BYTES))
    except (EOFError, OSError, *DAMAGE):  # reading the file from its beginning raises it again
        return ""


class Recoded(io.RawIOBase):
    """A stream that recodes another one as UTF-8, without its byte order mark.

    Bytes that are not valid text become invalid UTF-8, so that one record goes to quarantine and not the file.
    """

    def __init__(self, stream: Any, encoding: str) -> None:
        self.encoding = encoding
        self._stream = stream
        self._left = b""
        self._decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
        self._begun = False
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._left and not self._ended:
            self._left = self._next()
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size

    def _next(self) -> bytes:
        data = self._stream.read(_RECODE_BYTES)
        self._ended = not data
        try:
            text = self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError:  # half a character at the end, or half a pair of surrogates
            self._decoder.reset()
            return b"\xff"
        if text and not self._begun:
            self._begun = True
            text = text.removeprefix("\ufeff")
        return text.encode("utf-8", "surrogatepass")


@contextlib.contextmanager
def file_errors(store: Store, key: str) -> Iterator[None]:
    """Convert errors of decompression, Arrow and the operating system into those of this package.

    Raises:
        UnreadableFile: the content of the file is at fault.
        InputError: the file is missing, or reading it takes more memory than the machine has.
    """
    try:
        yield
    except FileNotFoundError:
        raise InputError("the file has been removed since the run began", where=store.at(key),
                         fix="do not change the input while a pipeline reads it, and run again") from None
    except MemoryError:  # not the file's fault: another machine may have enough
        raise InputError("reading the file takes more memory than is available", where=store.at(key),
                         fix="remove the file if it is damaged (a damaged file can request any amount of memory), or "
                             "use a machine with more memory") from None
    except (OSError, EOFError, *DAMAGE, pa.ArrowException) as error:  # a StorageError is not the file's fault
        raise UnreadableFile(first_line(error)) from None
