"""Reading web archives: pages give their main text, WET records their text; records before damage are kept."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import pytest

from tidewheel.data import readers
from tidewheel.data.config import ReadConfig
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers import read_records, web
from tidewheel.data.readers.page_text import main_text
from tidewheel.errors import InputError
from tidewheel.storage import store

pytest.importorskip("trafilatura")
pytest.importorskip("warcio")

WORDS = "The harbour of the old town was rebuilt after the storm, and its walls now stand twice as high as before. "


def page(number: int, text: str = WORDS) -> str:
    menu = "".join(f"<li><a href='/{link}'>Link {link}</a></li>" for link in range(12))
    body = "".join(f"<p>{text}Paragraph {number}-{part} says so, and says it to the end of the line.</p>"
                   for part in range(5))
    return (f"<html><head><title>Title {number}</title></head><body><nav><ul>{menu}</ul></nav>"
            f"<article><h1>Heading {number}</h1>{body}</article><footer>All rights reserved</footer></body></html>")


def http(body: bytes, kind: str = "text/html; charset=utf-8", status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{more}\r\n".encode() + body


def block(kind: str, content: bytes, number: int = 0, media: str = "application/http; msgtype=response",
          more: str = "") -> bytes:
    return (f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:{number:04d}>\r\n"
            f"WARC-Target-URI: http://www.site{number}.org/a\r\nWARC-Date: 2024-01-01T00:00:00Z\r\n{more}"
            f"Content-Type: {media}\r\nContent-Length: {len(content)}\r\n\r\n").encode() + content + b"\r\n\r\n"


def response(number: int, **options) -> bytes:
    return block("response", http(page(number).encode(), **options), number)


def read(tmp_path, data, name="a.warc", **settings):
    (tmp_path / name).write_bytes(data)
    return list(read_records(store(tmp_path), name, ReadConfig(paths=("*",), **settings)))


def ids(found):
    return [item.reason if isinstance(item, Bad) else item.id for item in found]


def test_pages_come_with_their_address_and_without_their_menu(tmp_path):
    found, = read(tmp_path, response(3))
    assert (found.id, found.source, found.offset, found.line) == ("urn:uuid:0003", "a.warc", 0, 1)
    assert json.loads(found.meta) == {"url": "http://www.site3.org/a", "host": "www.site3.org", "_file": "a.warc",
                                      "date": "2024-01-01T00:00:00Z", "_line": 1, "_offset": 0}
    assert "Paragraph 3-4 says so" in found.text
    assert "Link 5" not in found.text
    assert read(tmp_path, response(3), source="host")[0].source == "www.site3.org"


def test_only_pages_are_documents(tmp_path):
    data = (block("warcinfo", b"software: x\r\n", 1, "application/warc-fields") + block("request", b"GET /", 2)
            + response(3, status="404 Not Found") + response(4, kind="image/png") + response(5, kind="Text/HTML")
            + block("response", b"whois", 6, "text/dns") + block("metadata", b"", 7) + response(8))
    result = read(tmp_path, data)
    assert ids(result) == ["urn:uuid:0005", "urn:uuid:0008"]
    for item in result:
        assert data[item.offset :].startswith(b"WARC/1.0")
        assert item.id.encode() in data[item.offset : item.offset + 90]


def test_compressed_http_bodies_are_decompressed(tmp_path):
    body = gzip.compress(page(1).encode())
    chunked = b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    more = "Transfer-Encoding: chunked\r\nContent-Encoding: gzip\r\n"
    found, = read(tmp_path, block("response", http(chunked, more=more)))
    assert "Paragraph 1-4" in found.text


def test_pages_in_other_encodings(tmp_path):
    text = "Das Café am Straßenende öffnet früh, und die Gäste genießen die Ruhe über den Dächern der Stadt. "
    html = page(1, text)
    for charset, body in (("iso-8859-1", html.encode("latin-1")), ('"utf-8"', html.encode()), ("", html.encode()),
                          ("no-such-charset", html.encode())):
        found, = read(tmp_path, block("response", http(body, f"text/html; charset={charset}")))
        assert "Café am Straßenende öffnet" in found.text


@pytest.mark.parametrize("body", [b"", b"<html></html>", b"<html><body><img src='a.png'></body></html>",
                                  b"\x00\xff\xfe" * 50])
def test_pages_without_a_main_text_go_to_quarantine(tmp_path, body):
    result = read(tmp_path, block("response", http(body)) + response(2))
    assert ids(result) == ["no_main_text", "urn:uuid:0002"]


def test_a_wet_record_is_its_text(tmp_path):
    data = (block("warcinfo", b"x", 1) + block("conversion", "Straße\n".encode(), 2, "text/plain",
                                               "WARC-Identified-Content-Language: deu\r\n")
            + block("conversion", b"caf\xe9", 3, "text/plain"))
    result = read(tmp_path, gzip.compress(data), "a.warc.wet.gz")
    assert ids(result) == ["urn:uuid:0002", "wrong_encoding"]
    assert result[0].text == "Straße\n"
    assert json.loads(result[0].meta)["identified_language"] == "deu"


RECORDS = [response(number) for number in range(4)]
PLAIN = b"".join(RECORDS)
MEMBERS = b"".join(map(gzip.compress, RECORDS))


def cuts(*parts: bytes) -> list[tuple[int, int]]:
    """(bytes left, records whole) with the cut at many places of a file of these parts."""
    found, before = [], 0
    for whole, part in enumerate(parts):
        found += [(before + cut, whole) for cut in (5, 100, 250, len(part) // 2, len(part) - 10) if cut < len(part)]
        before += len(part)
    return found


@pytest.mark.parametrize(("left", "whole"), cuts(*RECORDS))
def test_a_truncated_archive_keeps_earlier_records(tmp_path, left, whole):
    result = read(tmp_path, PLAIN[:left])
    assert ids(result) == [f"urn:uuid:{number:04d}" for number in range(whole)] + ["truncated_file"]
    assert result[-1].offset == len(b"".join(RECORDS[:whole]))


@pytest.mark.parametrize(("left", "whole"), cuts(*map(gzip.compress, RECORDS)))
def test_a_truncated_compressed_archive_keeps_earlier_records(tmp_path, left, whole):
    result = read(tmp_path, MEMBERS[:left], "a.warc.gz")
    good = [f"urn:uuid:{number:04d}" for number in range(whole)]
    assert ids(result) in ([*good, "truncated_file"], [*good, f"urn:uuid:{whole:04d}", "truncated_file"])


@pytest.mark.parametrize("member", range(4))
@pytest.mark.parametrize("part", ["content", "sum"])
def test_a_member_with_a_wrong_checksum_is_dropped(tmp_path, member, part):
    parts = list(map(gzip.compress, RECORDS))
    broken = bytearray(parts[member])
    broken[len(broken) // 2 if part == "content" else -8] ^= 0xFF
    parts[member] = bytes(broken)
    result = read(tmp_path, b"".join(parts), "a.warc.gz")
    assert ids(result) == [f"urn:uuid:{number:04d}" for number in range(member)] + ["damaged_file"]
    assert result[-1].offset == len(b"".join(RECORDS[:member]))


@pytest.mark.parametrize("broken", [
    b"hello\r\n", RECORDS[1].replace(b"Content-Length: ", b"Content-Length: x"),
    RECORDS[1].replace(b"Content-Length: ", b"Content-Lungth: "),
    RECORDS[1].replace(b"\r\n\r\nHTTP", b"\r\n" + b"x" * 70_000 + b"\r\n\r\nHTTP")])
def test_a_damaged_archive_keeps_earlier_records(tmp_path, broken):
    result = read(tmp_path, RECORDS[0] + broken + RECORDS[2])
    assert ids(result) == ["urn:uuid:0000", "damaged_file"]


def test_a_record_with_a_wrong_length_is_dropped(tmp_path):
    length = len(RECORDS[1].split(b"\r\n\r\n", 1)[1]) - 4
    short = RECORDS[1].replace(b"Content-Length: %d" % length, b"Content-Length: %d" % (length - 50))
    result = read(tmp_path, RECORDS[0] + short + RECORDS[2])
    assert ids(result) == ["urn:uuid:0000", "damaged_file"]
    assert result[-1].offset == len(RECORDS[0])


def test_a_record_that_is_too_long_affects_no_other(tmp_path):
    long = block("response", http(b"x" * 9000), 1)
    bomb = block("response", http(gzip.compress(b" " * 9000), more="Content-Encoding: gzip\r\n"), 2)
    result = read(tmp_path, RECORDS[0] + long + bomb + RECORDS[3], max_record_bytes=5000)
    assert ids(result) == ["urn:uuid:0000", "record_too_long", "no_main_text", "urn:uuid:0003"]


def test_the_text_depends_only_on_the_page():
    code = ("import sys; from tidewheel.data.readers.page_text import main_text; "
            "print(main_text(sys.stdin.buffer.read()))")
    html = page(1).replace("<h1>", "<div class='comments'><p>nice</p></div><table><tr><td>a</td></tr></table><h1>")
    texts = {subprocess.run([sys.executable, "-c", code], input=html.encode(), capture_output=True, check=True,
                            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed}).stdout
             for seed in ("0", "1", "2")}
    assert len(texts) == 1
    assert len({main_text(html.encode()) for _ in range(5)}) == 1, "earlier pages count for nothing"


def test_a_missing_package_error_says_what_to_install(monkeypatch):
    readers.check_installed([readers.Shape("warc", "gzip")], ReadConfig(paths=("*",)))
    monkeypatch.setattr(web.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"tidewheel\[web\]"):
        readers.check_installed([readers.Shape("jsonl"), readers.Shape("warc", "gzip")], ReadConfig(paths=("*",)))
    readers.check_installed([readers.Shape("jsonl")], ReadConfig(paths=("*",)))
