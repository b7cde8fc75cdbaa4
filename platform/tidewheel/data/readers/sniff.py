"""What a file holds, told by its first bytes: its name may say anything.

A format that can be read is read. What cannot be read has a name too: "a PNG image" helps more than "line 1 is not
JSON". Text in a file that is named as text stays text, whatever it begins with.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from tidewheel.data.config import ReadConfig
from tidewheel.data.reader import AUTO, READERS
from tidewheel.data.readers.csv_fields import MalformedError, split_line
from tidewheel.data.readers.packed import (
    DAMAGE,
    Recoded,
    UnreadableFile,
    encoding_of,
    opened,
    packing_of,
    told,
    unpacked_name,
)
from tidewheel.parts import is_own
from tidewheel.storage import Store

HEAD_BYTES = 64 << 10
_READ_BYTES = 4096
_UNPACK = "unpack it, or leave it out of read.paths"
_LEAVE = "leave it out of read.paths"
#: What begins so, what it is, and what to do about it.
_FOREIGN = (
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
    (b"BZh", "compressed with bzip2", "compress it with gzip or zstd instead"),
    (b"\xfd7zXZ\0", "compressed with xz", "compress it with gzip or zstd instead"),
    (b"\x04\x22\x4d\x18", "compressed with LZ4", "compress it with gzip or zstd instead"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", _UNPACK),
    (b"Rar!\x1a\x07", "a RAR archive", _UNPACK),
    (b"SQLite format 3\0", "an SQLite data base", "export its table as CSV or JSONL"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "convert it to Parquet first"),
    (b"\x93NUMPY", "a NumPy array", "convert it to Parquet first"),
    (b"ORC", "an ORC file", "convert it to Parquet first"),
    (b"Obj\x01", "an Avro file", "convert it to Parquet first"),
    (b"\x80\x04\x95", "a Python pickle, which is never opened", "write JSONL or Parquet with what made it"),
    (b"\xff\xfe\0\0", "text in UTF-32", "convert it to UTF-8, for example with iconv"),
    (b"\0\0\xfe\xff", "text in UTF-32", "convert it to UTF-8, for example with iconv"),
)
_TAR = (257, b"ustar")
_MARKUP = re.compile(rb"\s*<(!doctype\s+html|html|head|body)\b", re.IGNORECASE)
_DELIMITERS = {"csv": ",;|\t", "tsv": "\t,;|"}  # in the order in which they are tried


@dataclass(frozen=True)
class Shape:
    """What a file holds.

    Args:
        format: name of its reader.
        packing: "gzip", "zstd" or "".
        encoding: "utf-16-le", "utf-16-be", or "" for UTF-8 and what is no text.
        delimiter: what stands between the fields of a CSV or TSV file, else "".
        problem: why it cannot be read: what it is instead; "" when it can.
        hint: what to do about the problem.
    """

    format: str
    packing: str = ""
    encoding: str = ""
    delimiter: str = ""
    problem: str = ""
    hint: str = ""

    @property
    def is_seekable(self) -> bool:
        """True when reading may begin in the middle."""
        return not self.packing and not self.encoding

    def __str__(self) -> str:
        """For people: "csv, gzip, utf-16", or what it is instead."""
        if self.problem:
            return self.problem
        encoding = self.encoding and "utf-16"
        return ", ".join(part for part in (self.format, self.packing, encoding) if part)


def format_of_name(key: str, config: ReadConfig) -> str:
    """What the settings or the file's name say it is; "" when neither says it."""
    if config.format != AUTO:
        return config.format_name
    name = unpacked_name(key)
    return next((kind for kind, endings in endings().items() if name.endswith(endings)), "")


@cache
def endings() -> dict[str, tuple[str, ...]]:
    """Endings of each format, before that of a compression. Files with others are what their content is, JSONL in
    doubt."""
    found = {kind: READERS.find(kind).ENDINGS for kind in READERS.built_in()}
    return {kind: endings for kind, endings in found.items() if endings}


def shape_of(place: Store, key: str, config: ReadConfig) -> Shape:
    """What the file `key` holds. A function of its first `HEAD_BYTES`, its name and the settings.

    Raises:
        UnreadableFile: it cannot be read at all.
        InputError, StorageError: it is not there, or its storage fails.
    """
    with told(place, key), place.open(key) as stream:
        raw = stream.read(HEAD_BYTES)
    named = format_of_name(key, config)
    packing = packing_of(key, raw)
    if is_own(named):
        return Shape(named, packing)
    if raw.startswith((b"PAR1", b"ARROW1")) or (raw.startswith(b"\xff\xff\xff\xff") and named != "text"):
        return _checked(Shape("parquet" if raw.startswith(b"PAR1") else "arrow"), named, config)
    head, encoding = raw, ""
    if packing or named not in ("parquet", "arrow"):
        head, encoding = _unpacked_head(place, key, raw, packing)
    if foreign := _foreign(head) or (_foreign(raw) if not packing else None):
        return Shape(named or "jsonl", packing, "", "", *foreign)
    return _checked(_of_content(head, named, packing, encoding, config), named, config)


def _unpacked_head(place: Store, key: str, raw: bytes, packing: str) -> tuple[bytes, str]:
    """(the first bytes, unpacked and in UTF-8; the encoding they were in); fewer bytes where the file is damaged."""
    if not packing and not encoding_of(raw):
        return raw, ""
    head, encoding = b"", ""
    try:
        with opened(place, key) as stream:
            if isinstance(stream, io.BufferedReader) and isinstance(stream.raw, Recoded):
                encoding = stream.raw.encoding
            while len(head) < HEAD_BYTES and (more := stream.read(_READ_BYTES)):
                head += more
    except (UnreadableFile, EOFError, *DAMAGE):  # its reader tells
        pass
    return head, encoding


def _foreign(head: bytes) -> tuple[str, str] | None:
    """(what it is, what to do) of a file that no reader is for."""
    for magic, what, hint in _FOREIGN:
        if head.startswith(magic):
            return what, hint
    return ("a tar archive", _UNPACK) if head[_TAR[0] :].startswith(_TAR[1]) else None


def _of_content(head: bytes, named: str, packing: str, encoding: str, config: ReadConfig) -> Shape:
    """The shape of a file that begins with `head`, unpacked."""
    def shape(kind: str, **more: str) -> Shape:
        return Shape(kind, packing, encoding, **more)

    if named == "text" or (named == "warc" and head[:1] != b"{"):
        return shape(named)
    bare = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if config.format_name in _DELIMITERS and (table := _table(bare, named, config)):
        return shape(table[0], delimiter=table[1], problem=table[2], hint=table[3])
    if head.startswith(b"WARC/"):
        return shape("warc")
    if packing and head.startswith((b"PAR1", b"ARROW1")):
        return shape(named or "jsonl", problem=f"a columnar file packed with {packing}", hint="unpack it")
    text = bare
    is_whole = len(head) < HEAD_BYTES
    if text.startswith(b"{"):
        return shape("json" if _is_object_over_lines(text) else "jsonl")
    if text.startswith(b"["):
        return shape("json" if _is_array(text, is_whole) else "jsonl")
    may_be_table = named in ("csv", "tsv") or (named not in ("parquet", "arrow", "warc") and config.format == AUTO)
    if may_be_table and (table := _table(text, named, config)):
        return shape(table[0], delimiter=table[1], problem=table[2], hint=table[3])
    if _MARKUP.match(text):
        return shape(named or "jsonl", problem="an HTML page", hint="extract its text first; web archives (WARC) are "
                                                                    "read as they are")
    return shape(named or "jsonl")


def _checked(found: Shape, named: str, config: ReadConfig) -> Shape:
    """`found`, or the problem that `read.format` names another format."""
    if found.problem or config.format_name in (AUTO, found.format) or named == "":
        return found
    if {config.format_name, found.format} == {"csv", "tsv"}:  # the delimiter is told by the header
        return found
    if found.format == "jsonl":  # anything may be a damaged line
        return Shape(config.format_name, found.packing, found.encoding)
    return Shape(config.format_name, found.packing, found.encoding, "",
                 f"{READERS.find(found.format).SHOWN}, where read.format says {config.format_name}",
                 "leave out read.format: the content decides then")


def _is_object_over_lines(text: bytes) -> bool:
    """True when the text begins with a JSON object that does not end in its first line."""
    first, newline, _ = text.partition(b"\n")
    if not newline or _parses(first):
        return False
    if first.strip() == b"{":
        return text[1:].lstrip()[:1] in (b'"', b"}")
    try:
        _, end = json.JSONDecoder().raw_decode(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return False
    return end > len(first)


def _is_array(text: bytes, is_whole: bool) -> bool:
    """True when the text begins with one JSON array of records, False for lines of arrays and for anything else."""
    first, newline, rest = text.partition(b"\n")
    if newline and _parses(first) and rest.lstrip()[:1] not in (b"", b"]"):
        return False  # a line that is an array, and more lines
    inside = text[1:].lstrip()[:1]
    return inside == b"{" or (inside == b"]" and is_whole) or (inside == b"" and is_whole)


def _parses(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _table(text: bytes, named: str, config: ReadConfig) -> tuple[str, str, str, str] | None:
    """(format, delimiter, problem, hint) of a table with a header; None when it is none."""
    lines = text.decode("utf-8", "replace").splitlines()
    if not lines:
        return (named, _DELIMITERS[named][0], "", "") if named in _DELIMITERS else None
    layouts = (config.messages, config.conversations, config.completion, config.output, config.chosen)
    is_one_of = config.kind != "documents"
    wanted = set(layouts) if is_one_of else set(config.text_fields)
    for delimiter in _DELIMITERS[named if named == "tsv" else "csv"]:
        header = _header(lines[0], delimiter)
        if (wanted & set(header) if is_one_of else wanted <= set(header)) and (named in _DELIMITERS or len(header) > 1):
            return named if named in _DELIMITERS else "tsv" if delimiter == "\t" else "csv", delimiter, "", ""
    if named in _DELIMITERS or _is_regular(lines):
        delimiter = max(_DELIMITERS["tsv" if named == "tsv" else "csv"], key=lambda mark: len(_header(lines[0], mark)))
        header = _header(lines[0], delimiter)
        kind = named if named in _DELIMITERS else "tsv" if delimiter == "\t" else "csv"
        names = ", ".join(map(repr, header[:8])) + (", ..." if len(header) > 8 else "")
        absent = next((name for name in config.text_fields if name not in header), "")
        field, setting = (config.messages, "messages") if is_one_of else (absent, "text")
        return (kind, delimiter, f"{kind.upper()} without a column {field!r}; there are {names}"[:300],
                f"name the column with read.{setting}, or add a header line")
    return None


def _header(line: str, delimiter: str) -> list[str]:
    try:
        return [field.strip() for field in split_line(line, delimiter)]
    except MalformedError:
        return []


def _is_regular(lines: list[str]) -> bool:
    """True when lines look like rows of a table: as many delimiters, at least one, in each of the first."""
    rows = [line for line in lines[:6] if line.strip()]
    if len(rows) < 3 or any(line.lstrip()[:1] in "{[" for line in rows):
        return False
    return any(len(widths := {len(_header(line, mark)) for line in rows[:-1]}) == 1 and widths.pop() > 1
               for mark in ",;\t|")


def values_of(shape: Shape) -> list[str]:
    """For the inputs of a task."""
    return [shape.format, shape.packing, shape.encoding, shape.delimiter, shape.problem, shape.hint]


def shape_from(values: list[Any]) -> Shape:
    """What `values_of` gave."""
    return Shape(*values)
