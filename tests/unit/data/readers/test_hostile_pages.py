"""Pages that would stall a pipeline are refused by counts or killed by the kernel; later pages are read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import brotli
import pytest

from tests.unit.data.readers.test_web import block, http, ids, page, read, response
from tidewheel.data.compression import zstd
from tidewheel.data.readers import page_text
from tidewheel.data.readers.page_process import PageProcess
from tidewheel.errors import InputError

pytest.importorskip("trafilatura")
pytest.importorskip("warcio")

ATTRIBUTES = "<div " + " ".join(f"a{number}=1" for number in range(200_000)) + ">"
WORDS = "<p>The harbour of the old town was rebuilt after the storm, and its walls now stand twice as high.</p>" * 5


@pytest.mark.parametrize("body", [
    ATTRIBUTES,
    "<script>if (a<b) x='</script>" + ATTRIBUTES,
    "<!-- <a x=' -->" + ATTRIBUTES,
    "<p title='<a b=\"'>" + ATTRIBUTES,
    "<p =\"x>" + ATTRIBUTES,
    "<br>" * 201_000,
    "<p>" + "<a href=x>a</a> x " * 21_000 + "</p>",
    "<!---->" * 201_000,
], ids=["attributes", "script", "comment", "value", "equals", "tags", "siblings", "comments"])
def test_a_page_over_a_limit_goes_to_quarantine(tmp_path, body):
    begin = time.process_time()
    html = f"<html><body><article>{body}{WORDS}</article></body></html>"
    result = read(tmp_path, block("response", http(html.encode())) + response(2))
    assert ids(result) == ["page_too_complex", "urn:uuid:0002"]
    assert "more than" in result[0].detail
    assert time.process_time() - begin < 5


def test_a_large_real_page_is_read(tmp_path):
    rows = "".join(f"<p class='a b' id='n{number}'>Line {number} of a <b>long</b> page.</p>" for number in range(2000))
    script = "<script>for (i = 0; i <n; i++) { " + "a = b && c; " * 3000 + "}</script>"
    image = f"<img src='data:image/png;base64,{'A' * 500_000}'>"
    html = f"<html><body>{script}<article>{image}{rows}</article></body></html>"
    found, = read(tmp_path, block("response", http(html.encode())))
    assert "Line 1999 of a long page." in found.text


@pytest.mark.parametrize("body", ["<a" * 150_000, "<a x=\"<a x='" * 90_000, "<a b=" + "'<b '" * 90_000,
                                  "<a x='" + "<a " * 150_000, "<a =" + '"x>"' * 150_000, "<" * 1_000_000,
                                  "<a b='" + "c='d" * 100_000])
def test_counting_takes_linear_time(body):
    begin = time.process_time()
    try:
        page_text.check_tags(body)
    except page_text.TooComplex:
        pass
    assert time.process_time() - begin < 2


@pytest.fixture
def reader():
    reader = PageProcess(cpu_seconds=0)  # the kernel rounds up to a second
    yield reader
    reader.close()


def test_a_slow_page_ends_at_the_cpu_time_limit(reader, monkeypatch):
    slow = ("<html><body><article><p>" + "<a href='x'>a b c</a> x " * 19_000 + "</p></article></body></html>").encode()
    result = reader.read(slow)
    assert (result.text, result.reason) == (None, "page_too_slow")
    assert "Paragraph 1-4" in (reader.read(page(1).encode()).text or "")


def kill_before(monkeypatch, number, times):
    ask, left = PageProcess._ask, [number] * times

    def asked(self, child, html, charset):
        if left:
            os.kill(child.pid, left.pop())
            child.wait()
        return ask(self, child, html, charset)
    monkeypatch.setattr(PageProcess, "_ask", asked)


def test_a_page_that_crashes_the_parser_goes_to_quarantine(reader, monkeypatch):
    kill_before(monkeypatch, signal.SIGSEGV, 2)
    assert reader.read(page(1).encode()).reason == "page_breaks_parser"


def test_a_killed_child_raises_input_error(reader, monkeypatch):
    kill_before(monkeypatch, signal.SIGKILL, 2)
    with pytest.raises(InputError, match="for lack of memory"):
        reader.read(page(1).encode())
    kill_before(monkeypatch, signal.SIGKILL, 1)
    assert reader.read(page(1).encode()).text, "a child that was killed once is replaced"


def test_the_child_ends_with_its_parent():
    code = ("import os, signal; from tidewheel.data.readers.page_process import PageProcess; reader = PageProcess(); "
            "reader.read(b'<p>x</p>'); print(reader.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": ":".join(sys.path)})
    child = Path(f"/proc/{int(done.stdout)}")
    until = time.monotonic() + 60
    while child.exists() and time.monotonic() < until and "\nState:\tZ" not in (child / "status").read_text():
        time.sleep(0.02)
    assert not child.exists() or "\nState:\tZ" in (child / "status").read_text()


@pytest.mark.parametrize(("encoding", "pack"),
                         [("br", brotli.compress), ("zstd", zstd.compress), ("BR", brotli.compress)])
@pytest.mark.parametrize("chunked", [True, False])
def test_packed_pages_are_read(tmp_path, encoding, pack, chunked):
    body = pack(page(1).encode())
    more = f"Content-Encoding: {encoding}\r\n"
    if chunked:
        body = b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
        more += "Transfer-Encoding: chunked\r\n"
    found, = read(tmp_path, block("response", http(body, more=more)))
    assert "Paragraph 1-4" in found.text


@pytest.mark.parametrize(("encoding", "pack"), [("br", partial(brotli.compress, quality=4)), ("zstd", zstd.compress)])
def test_packed_pages_are_bounded(tmp_path, encoding, pack):
    more = f"Content-Encoding: {encoding}\r\n"
    bomb = http(pack(b" " * 20_000_000), more=more)
    cut = pack(os.urandom(250_000).hex().encode())
    cut = http(cut[: len(cut) * 3 // 4], more=more)
    plain = http(page(2).encode(), more=more)  # some archives unpack the page and keep the header
    result = read(tmp_path, b"".join(block("response", content, number)
                                    for number, content in enumerate((bomb, cut, plain))), max_record_bytes=1_000_000)
    assert ids(result) == ["no_main_text", "no_main_text", "urn:uuid:0002"]
    assert "unpacked it has more than 1000000 bytes" in result[0].detail
    assert "cut off" in result[1].detail
