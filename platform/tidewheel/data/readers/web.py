"""Read web archives: the main text that trafilatura extracts from the HTML of WARC records, and the text of WET.

This module parses archives itself and strictly: the libraries for them stop without an error where a file is cut off,
so documents would be lost unnoticed. warcio decodes the HTTP bodies, except for Brotli, which it cannot read with
brotli 1.2, and Zstandard, which it does not support.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tidewheel.data.compression import DAMAGE, first_line, zstd
from tidewheel.data.config import ReadConfig
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers.packed import opened
from tidewheel.data.readers.page_process import page_process
from tidewheel.data.readers.record import Location, Record, record
from tidewheel.errors import InputError
from tidewheel.storage import Store

PACKAGES = ("trafilatura", "warcio", "lxml", "brotli")
"""Packages that decide the text of a page. Their versions are part of a unit's key."""
_HEADER_BYTES = 64 << 10
_HTML = ("text/html", "application/xhtml+xml")


@dataclass(frozen=True)
class _Block:
    """One record of an archive, or the fault that ends the archive.

    Args:
        offset: offset of its first byte in the decompressed archive.
        headers: headers by lower-case name.
        content: content; None if it is too long.
        fault: reason of `quarantine.REASONS` for which the rest of the archive cannot be read; "" for a record.
        detail: explanation of the fault.
    """

    offset: int
    headers: dict[str, str]
    content: bytes | None
    fault: str = ""
    detail: str = ""


def records(store: Store, key: str, config: ReadConfig, name: str) -> Iterator[Record | Bad]:
    """Yield the pages of an archive: HTML responses with status 200, and conversions (WET). Skip other records.

    A page has the fields `id` (the record's id in the archive), `url`, `host`, `date`, for WET `identified_language`,
    and the text. Its offset refers to the decompressed archive; its line is the number of the record.

    Args:
        store: the store of the archive.
        key: its key there.
        config: the settings of `read`.
        name: what quarantine calls the archive.

    Raises:
        InputError: the packages for HTML are not installed.
    """
    check_installed()
    with opened(store, key) as stream:
        for number, block in enumerate(_blocks(stream, config.max_record_bytes), start=1):
            location = Location(name, number, block.offset)
            if block.fault:
                yield location.bad(block.fault, b"", f"{block.detail}; the records before are kept")
            elif (row := _page(block, config, location)) is not None:
                yield row


def _blocks(stream: Any, limit: int) -> Iterator[_Block]:
    """Yield the records of an archive, and a block with the fault where the archive cannot be parsed any further.

    Yield a block only after reaching the next one: then its length is correct, and so is the checksum if the record is
    a separate gzip member.
    """
    start = end = 0
    block: _Block | None = None
    try:
        while True:
            start = block.offset if block else end
            line, next_at = _next_line(stream, end)
            if block and line and not line.startswith(b"WARC/") and next_at == end:  # else blank lines ended it
                raise ValueError("a record is longer than it says")
            end = next_at
            if block:
                yield block
                block = None
            if not line:
                return
            start = end
            if not line.startswith(b"WARC/"):
                raise ValueError("no record begins here")
            headers, size = _headers(stream, line)
            length = int(headers["content-length"])
            content: bytes | None = None
            if length > limit:
                _skip(stream, length)
            elif len(content := stream.read(length)) < length:
                raise EOFError
            end += size + length
            block = _Block(start, headers, content)
    except EOFError:
        if block:  # only the end of the compressed stream is missing
            yield block
        yield _Block(start if block is None else end, {}, None, "truncated_file", "the archive ends too early")
    except (ValueError, *DAMAGE) as error:
        yield _Block(start, {}, None, "damaged_file", first_line(error))


def _next_line(stream: Any, offset: int) -> tuple[bytes, int]:
    """Return (first line that is not blank, its offset); the line is empty at the end of the stream."""
    while (line := stream.readline(_HEADER_BYTES)) and not line.strip():
        offset += len(line)
    return line, offset


def _headers(stream: Any, line: bytes) -> tuple[dict[str, str], int]:
    """Return (headers by lower-case name, their length in bytes) of the record that begins with `line`."""
    size = len(line)
    last = ""
    headers: dict[str, str] = {}
    while (line := stream.readline(_HEADER_BYTES)).strip():
        size += len(line)
        if size > _HEADER_BYTES:
            raise ValueError("the headers of a record do not end")
        text = line.decode("utf-8", "replace").strip()
        if line[:1] in b" \t" and last:  # a header may continue on the next line
            headers[last] += " " + text
            continue
        last, _, value = text.partition(":")
        last = last.strip().lower()
        headers[last] = value.strip()
    if not line.endswith(b"\n"):
        raise EOFError
    if not headers.get("content-length", "").isdecimal():
        raise ValueError("a record without its length")
    return headers, size + len(line)


def _skip(stream: Any, length: int) -> None:
    while length:
        data = stream.read(min(length, 1 << 20))
        if not data:
            raise EOFError
        length -= len(data)


def _page(block: _Block, config: ReadConfig, location: Location) -> Record | Bad | None:
    """Return the document of one record; None if the record is not a page."""
    headers, content = block.headers, block.content
    kind = headers.get("warc-type", "")
    if kind not in ("response", "conversion") or (kind == "response" and not _is_http(headers)):
        return None
    if content is None:
        return location.bad("record_too_long", b"", f"more than {config.max_record_bytes} bytes")
    url = headers.get("warc-target-uri", "").strip("<>")
    values = {"id": headers.get("warc-record-id", "").strip("<>") or None, "url": url or None,
              "host": _host(url), "date": headers.get("warc-date")}
    if kind == "conversion":
        try:
            text: str | None = content.decode("utf-8")
        except UnicodeDecodeError as error:
            return location.bad("wrong_encoding", content, f"byte {error.start}: {error.reason}")
        values["identified_language"] = headers.get("warc-identified-content-language")
    else:
        try:
            html = _html(content, config.max_record_bytes)
        except (InputError, MemoryError):
            raise
        except Exception as error:  # a page is hostile input and must not end the run
            return location.bad("no_main_text", content, f"{type(error).__name__}: {first_line(error)}")
        if html is None:
            return None
        page = page_process().read(*html)
        text = page.text
        if text is None:
            return location.bad(page.reason, content, page.detail or url)
    given = {name: value for name, value in values.items() if value is not None}
    return record({**given, config.text_name: text}, config, location, content)


def _is_http(headers: dict[str, str]) -> bool:
    return headers.get("content-type", "").lower().startswith("application/http")


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _html(content: bytes, limit: int) -> tuple[bytes, str] | None:
    """Return (HTML, charset that HTTP names or "") of a response; None if it is not HTML or its status is not 200.

    Raises:
        Exception: the response is not HTTP, or its content cannot be decompressed.
    """
    from warcio.recordloader import ArcWarcRecord
    from warcio.statusandheaders import StatusAndHeadersParser

    stream = io.BytesIO(content)
    head = StatusAndHeadersParser(["HTTP/"], verify=False).parse(stream)
    kind, *parameters = (head.get_header("content-type") or "").split(";")
    if head.get_statuscode() != "200" or kind.strip().lower() not in _HTML:
        return None
    encoding = (head.get_header("content-encoding") or "").strip().lower()
    if unpack := _UNPACK.get(encoding):
        head.remove_header("content-encoding")
    body = ArcWarcRecord("warc", "response", None, stream, head, None, None).content_stream().read(limit + 1)
    if unpack and len(body) <= limit:
        body = unpack(body, limit + 1)
    if len(body) > limit:
        raise ValueError(f"unpacked it has more than {limit} bytes")
    return body, _charset(parameters)


def _charset(parameters: list[str]) -> str:
    """Return the charset among the parameters of a content type; "" if there is none."""
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip("\"'")
    return ""


def _brotli(body: bytes, most: int) -> bytes:
    """Return at most `most` decompressed bytes of a Brotli body; the body itself if it is already plain.

    Some archives store a plain body and keep the header that says it is compressed.

    Raises:
        EOFError: the compressed data are cut off.
    """
    import brotli

    decoder = brotli.Decompressor()
    try:
        content: bytes = decoder.process(body, output_buffer_limit=most)
    except brotli.error:
        return body
    if decoder.is_finished() or len(content) >= most:
        return content
    return _cut_off(body, content)


def _zstd(body: bytes, most: int) -> bytes:
    """Return at most `most` decompressed bytes of a Zstandard body, like `_brotli`."""
    decoder = zstd.ZstdDecompressor()
    try:
        content = decoder.decompress(body, max_length=most)
    except zstd.ZstdError:
        return body
    if decoder.eof or len(content) >= most:
        return content
    return _cut_off(body, content)


def _cut_off(body: bytes, content: bytes) -> bytes:
    if not content:
        return body
    raise EOFError("the packed page is cut off")


_UNPACK = {"br": _brotli, "zstd": _zstd}


def check_installed() -> None:
    """Check that the packages for web archives are installed.

    Raises:
        InputError: a package is missing.
    """
    if not all(importlib.util.find_spec(name) for name in PACKAGES):
        raise InputError("reading WARC needs packages that are not installed", where="read.format",
                         fix="pip install 'tidewheel[web]'")
