"""Opening source files: packed bytes come out unpacked, UTF-16 as UTF-8; whose fault an error is, the file's or the
storage's. The first bytes decide, whatever the file is called."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow as pa

from tidewheel.errors import InputError
from tidewheel.storage import Store

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CODECS = {".gz": "gzip", ".zst": "zstd"}
_MAGIC = (("gzip", b"\x1f\x8b"), ("zstd", b"\x28\xb5\x2f\xfd"),
          *(("zstd", bytes([0x50 + number]) + b"\x2a\x4d\x18") for number in range(16)))  # skippable frames
_BOMS = (("", codecs.BOM_UTF32_LE), ("utf-16-le", codecs.BOM_UTF16_LE), ("utf-16-be", codecs.BOM_UTF16_BE))
_LOOK_BYTES = 16
_RECODE_BYTES = 64 << 10
DAMAGE = (zlib.error, gzip.BadGzipFile, zstd.ZstdError)
"""What unpacking raises when the compressed bytes are not what was written."""


class UnreadableFile(Exception):
    """The file as a whole cannot be trusted or read; its text is the reason. What was read of it does not count."""


class Stream(Protocol):
    """What the readers need of a stream."""

    def readline(self, size: int = -1, /) -> bytes: ...

    def read(self, size: int = -1, /) -> bytes: ...


def unpacked_name(key: str) -> str:
    """The key in small letters, without the ending of a compression."""
    key = key.lower()
    return next((key.removesuffix(ending) for ending in CODECS if key.endswith(ending)), key)


def is_packed(key: str) -> bool:
    """True when the file's name says that it is compressed."""
    return unpacked_name(key) != key.lower()


def packing_of(key: str, head: bytes) -> str:
    """"gzip", "zstd" or "": how a file with these first bytes is compressed.

    A file that is named as compressed and does not begin so is plain if it begins with text, else damaged.
    """
    for packing, magic in _MAGIC:
        if head.startswith(magic):
            return packing
    claimed = next((packing for ending, packing in CODECS.items() if key.lower().endswith(ending)), "")
    return "" if claimed and head and _is_text(head) else claimed


def _is_text(head: bytes) -> bool:
    text = head.decode("utf-8", "ignore")  # a character may be cut off at the end
    return len(text.encode()) > len(head) - 4 and all(character.isprintable() or character.isspace()
                                                      for character in text)


def encoding_of(head: bytes) -> str:
    """The encoding that a file with these first bytes, unpacked, is in, if it is not UTF-8, else "".

    By its byte order mark, or, as text begins with ASCII where JSON or a table does, by where the zero bytes are.
    """
    for encoding, mark in _BOMS:
        if head.startswith(mark):
            return encoding
    zeros = [byte == 0 for byte in head[:4]]
    if zeros == [False, True, False, True]:
        return "utf-16-le"
    return "utf-16-be" if zeros == [True, False, True, False] else ""


@contextlib.contextmanager
def opened(place: Store, key: str) -> Iterator[Any]:
    """The file as a stream of bytes, unpacked, in UTF-8; seekable when it is neither packed nor in another encoding.

    Raises:
        UnreadableFile: its bytes are damaged: a checksum fails, or it is not what its ending says.
        EOFError: by the stream's own methods, where compressed data end too early.
        InputError, StorageError: it is not there, or its storage fails: nothing the content is to blame for.
    """
    with told(place, key), place.open(key) as stream:
        packing = packing_of(key, stream.read(_LOOK_BYTES))
        encoding = _encoding(stream, packing)
        unpacked = _unpacked(stream, packing)
        yield io.BufferedReader(Recoded(unpacked, encoding)) if encoding else unpacked


@contextlib.contextmanager
def unpacked(place: Store, key: str) -> Iterator[Any]:
    """The file as a stream of bytes, unpacked, whatever they stand for; errors as in `opened`."""
    with told(place, key), place.open(key) as stream:
        yield _unpacked(stream, packing_of(key, stream.read(_LOOK_BYTES)))


def _unpacked(stream: Any, packing: str) -> Any:
    """The file from its beginning."""
    stream.seek(0)
    if packing == "gzip":
        return gzip.GzipFile(fileobj=stream, mode="rb")  # checks length and sum, reads files of several members
    return zstd.ZstdFile(stream) if packing == "zstd" else stream


def _encoding(stream: Any, packing: str) -> str:
    try:
        return encoding_of(_unpacked(stream, packing).read(_LOOK_BYTES))
    except (EOFError, OSError, *DAMAGE):  # whoever reads the file from its beginning meets it again
        return ""


class Recoded(io.RawIOBase):
    """A stream in another encoding as UTF-8, without its byte order mark.

    What is no text becomes bytes that are no UTF-8, so that the record it is in is told, not the file.
    """

    def __init__(self, stream: Any, encoding: str) -> None:
        self.encoding = encoding
        self._stream, self._left = stream, b""
        self._decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
        self._begun = self._ended = False

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
def told(place: Store, key: str) -> Iterator[None]:
    """What goes wrong with a file, in our words; errors as in `opened`."""
    try:
        yield
    except FileNotFoundError:
        raise InputError("the file has gone since the run began", where=place.at(key),
                         fix="leave the input as it is while a pipeline reads it, and run again") from None
    except MemoryError:  # no verdict on the file: elsewhere there may be enough
        raise InputError("reading it takes more memory than there is", where=place.at(key),
                         fix="a damaged file can ask for any amount: take it away, or use a machine with more memory"
                         ) from None
    except (OSError, EOFError, *DAMAGE, pa.ArrowException) as error:  # a StorageError is no fault of the file
        raise UnreadableFile(first_line(error)) from None


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
