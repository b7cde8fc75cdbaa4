"""Recognise files that no reader supports: "a PNG image" is a better message than "line 1 is not JSON"."""

from __future__ import annotations

import re

_UNPACK = "unpack it, or leave it out of read.paths"
_LEAVE = "leave it out of read.paths"
_RECOMPRESS = "compress it with gzip or zstd instead"
_TO_PARQUET = "convert it to Parquet first"
_TO_UTF_8 = "convert it to UTF-8, for example with iconv"
#: (first bytes, description of the file, fix)
_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "a PNG image", _LEAVE),
    (b"\xff\xd8\xff", "a JPEG image", _LEAVE),
    (b"GIF87a", "a GIF image", _LEAVE),
    (b"GIF89a", "a GIF image", _LEAVE),
    (b"II*\0", "a TIFF image", _LEAVE),
    (b"MM\0*", "a TIFF image", _LEAVE),
    (b"RIFF", "an image, sound or film (RIFF)", _LEAVE),
    (b"\0asm", "a WebAssembly program", _LEAVE),
    (b"\x7fELF", "a program (ELF)", _LEAVE),
    (b"ID3", "sound (MP3)", _LEAVE),
    (b"OggS", "sound (Ogg)", _LEAVE),
    (b"fLaC", "sound (FLAC)", _LEAVE),
    (b"%PDF-", "a PDF document", "extract its text first, for example with pdftotext"),
    (b"{\\rtf", "an RTF document", "convert it to text first"),
    (b"\xd0\xcf\x11\xe0", "an old Microsoft Office document", "convert it to text or CSV first"),
    (b"PK\x03\x04", "a ZIP archive, or a document of an office program", _UNPACK),
    (b"BZh", "compressed with bzip2", _RECOMPRESS),
    (b"\xfd7zXZ\0", "compressed with xz", _RECOMPRESS),
    (b"\x04\x22\x4d\x18", "compressed with LZ4", _RECOMPRESS),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", _UNPACK),
    (b"Rar!\x1a\x07", "a RAR archive", _UNPACK),
    (b"SQLite format 3\0", "an SQLite data base", "export its table as CSV or JSONL"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", _TO_PARQUET),
    (b"\x93NUMPY", "a NumPy array", _TO_PARQUET),
    (b"ORC", "an ORC file", _TO_PARQUET),
    (b"Obj\x01", "an Avro file", _TO_PARQUET),
    (b"\x80\x04\x95", "a Python pickle, which is never opened", "write JSONL or Parquet with what made it"),
    (b"\xff\xfe\0\0", "text in UTF-32", _TO_UTF_8),
    (b"\0\0\xfe\xff", "text in UTF-32", _TO_UTF_8),
)
_TAR = (257, b"ustar")
_MARKUP = re.compile(rb"\s*<(!doctype\s+html|html|head|body)\b", re.IGNORECASE)


def binary_problem(head: bytes) -> tuple[str, str] | None:
    """Return (description, fix) if the first bytes are those of an unsupported format; None otherwise."""
    for signature, description, hint in _SIGNATURES:
        if head.startswith(signature):
            return description, hint
    offset, mark = _TAR
    return ("a tar archive", _UNPACK) if head[offset:].startswith(mark) else None


def markup_problem(text: bytes) -> tuple[str, str] | None:
    """Return (description, fix) if the text is an HTML page; None otherwise."""
    if _MARKUP.match(text):
        return "an HTML page", "extract its text first; web archives (WARC) are read as they are"
    return None
