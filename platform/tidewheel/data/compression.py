"""Decompress gzip and zstd. The first bytes decide how a file is compressed, not its name."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from typing import Any

from tidewheel.errors import InputError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CODECS = {".gz": "gzip", ".zst": "zstd"}
_MAGIC = (("gzip", b"\x1f\x8b"), ("zstd", b"\x28\xb5\x2f\xfd"),
          *(("zstd", bytes([0x50 + variant]) + b"\x2a\x4d\x18") for variant in range(16)))  # skippable frames
LOOK_BYTES = 16
"""First bytes that `packing_of` looks at."""
DAMAGE = (zlib.error, gzip.BadGzipFile, zstd.ZstdError)
"""Exceptions that decompression raises if the compressed bytes are damaged."""
MAX_WHOLE_BYTES = 1 << 30
"""Limit of a decompressed file that is read as a whole, such as a list of words or a benchmark."""


def unpacked_name(key: str) -> str:
    """Return the key in lower case, without the ending of a compression."""
    key = key.lower()
    return next((key.removesuffix(ending) for ending in CODECS if key.endswith(ending)), key)


def is_packed(key: str) -> bool:
    """Return whether the file's name says that it is compressed."""
    return unpacked_name(key) != key.lower()


def packing_of(key: str, head: bytes) -> str:
    """Return how a file with these first bytes is compressed: "gzip", "zstd" or "".

    A file that is named as compressed but does not begin as such is plain if it begins with text, and damaged
    otherwise.
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


def decompress(data: bytes, where: str, limit: int = MAX_WHOLE_BYTES) -> bytes:
    """Decompress the content of a small file, or return it as it is if its first bytes are not of a compression.

    Args:
        data: all bytes of the file.
        where: for error messages.
        limit: bytes that it may have.

    Raises:
        InputError: it is damaged, or is longer than `limit`.
    """
    packing = packing_of("", data[:LOOK_BYTES])
    if not packing:
        return data
    try:
        content: bytes = decompressed_stream(io.BytesIO(data), packing).read(limit + 1)
    except (OSError, EOFError, *DAMAGE) as error:
        raise InputError(f"cannot be decompressed ({first_line(error)})", where=where, fix="make the file again"
                         ) from None
    if len(content) > limit:
        raise InputError(f"has more than {limit:,} bytes when it is decompressed", where=where,
                         fix="split the file, or make it again if it is damaged")
    return content


def decompressed_stream(stream: Any, packing: str) -> Any:
    """Return a stream of the decompressed file from its beginning."""
    stream.seek(0)
    if packing == "gzip":
        return gzip.GzipFile(fileobj=stream, mode="rb")  # checks length and sum, reads files of several members
    return zstd.ZstdFile(stream) if packing == "zstd" else stream


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
