"""The main text of an HTML page, and the process that takes pages apart so that one of them cannot stop a pipeline.

Run as a file, this is that process (`page_process` starts it): it reads pages from standard input and answers with
their texts. It imports nothing of the package, so that it starts quickly.

A page is refused before libxml2 sees it when it has more tags, or attributes in a tag, than any real page; both are
counted, so every machine refuses the same pages. What is not counted ends at a limit of processor time that the kernel
enforces, also inside C code. It is set wide: a page below the counts takes a fifth of it at most.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import struct
import sys
import time
from typing import Any, BinaryIO

CPU_SECONDS = 300
"""Processor time for one page."""
MAX_TAGS = 200_000
"""Start tags and comments in a page. trafilatura takes about 0.1 ms for each."""
MAX_ATTRIBUTE_PAIRS = 400_000_000
"""Sum over all tags of the square of their attributes: libxml2 compares each attribute of a tag with those before it.
A single tag may have 20,000."""
MAX_SIBLING_PAIRS = 400_000_000
"""Sum over all elements of the square of their children: trafilatura walks along the children for each of them."""
SCAN_FACTOR = 16
"""Characters looked at per character of the page while attributes are counted."""

REQUEST = struct.Struct("<IQ")
"""Length of the charset and of the page, which follow."""
ANSWER = struct.Struct("<cQ")
"""TEXT, NOTHING, COMPLEX or FAILED, and the length of what follows: the text, or what is wrong."""
TEXT, NOTHING, COMPLEX, FAILED = b"t", b"n", b"c", b"f"

_TAG = re.compile(r"<[A-Za-z!?]")
_ATTRIBUTE = (r"[ \t\n\f\r/]*+[^ \t\n\f\r/>][^ \t\n\f\r/>=]*+"
              r"""(?:[ \t\n\f\r]*+=[ \t\n\f\r]*+(?:"[^"]*+(?:"|\Z)|'[^']*+(?:'|\Z)|[^ \t\n\f\r>]*+))?+""")
_ONE = re.compile(_ATTRIBUTE)
_START_TAG = re.compile(rf"<[A-Za-z][^ \t\n\f\r/>]*+(?:{_ATTRIBUTE})*+")
_FEW_BYTES = 4096
"""A shorter tag has at most half as many attributes, too few to be worth counting."""


class TooComplex(Exception):
    """The page is over a limit; the text says which."""


def main_text(html: bytes, charset: str = "") -> str | None:
    """Return the main text of a page, without navigation, comments and boilerplate; None when it has none.

    trafilatura (Barbaresi 2021) favours precision, as for FineWeb. Its `deduplicate` is off: it remembers earlier
    pages, so the text would depend on the order of reading.

    Args:
        html: the page.
        charset: what HTTP says it is; "" or a wrong one leaves that to the page.

    Raises:
        TooComplex: the page is over a limit.
    """
    import trafilatura

    page = _decoded(html, charset)
    if check_tags(page) ** 2 > MAX_SIBLING_PAIRS:  # with fewer tags there cannot be too many siblings
        _check_siblings(trafilatura.load_html(page))
    text = trafilatura.extract(page, favor_precision=True, include_comments=False, deduplicate=False)
    return text if text and text.strip() else None


def _decoded(html: bytes, charset: str) -> str:
    """Return the page as text, decoded as trafilatura does: what is counted is what libxml2 sees."""
    from trafilatura.utils import decode_file

    if charset:
        try:
            return html.decode(charset)
        except (UnicodeDecodeError, LookupError):
            pass  # the page itself says what it is, or its bytes do
    return decode_file(html)


def check_tags(page: str) -> int:
    """Return the number of tags; raise TooComplex when the page has too many, or too many attributes in a tag.

    A tag may begin at every `<` before a letter. Some of them are inside scripts, comments or values and begin none,
    but whichever of them do begin one are read as libxml2 reads them, so no page hides its attributes.
    """
    starts = [match.start() for match in _TAG.finditer(page)]
    if len(starts) > MAX_TAGS:
        raise TooComplex(f"{len(starts)} tags, more than {MAX_TAGS}")
    pairs = 0
    left = SCAN_FACTOR * len(page) + (1 << 20)
    for begin in starts:
        match = _START_TAG.match(page, begin)
        if match is None:
            continue
        length = match.end() - begin
        left -= length
        if length > _FEW_BYTES:
            attributes = sum(1 for _ in _ONE.finditer(page, begin, match.end()))
            pairs += attributes * attributes
            left -= length
        if pairs > MAX_ATTRIBUTE_PAIRS:
            raise TooComplex(f"a tag at character {begin} has {attributes} attributes; squared and summed over all "
                             f"tags that is more than {MAX_ATTRIBUTE_PAIRS}")
        if left < 0:
            raise TooComplex("its tags do not end")
    return len(starts)


def _check_siblings(tree: Any) -> None:
    if tree is None:
        return
    pairs = sum(len(element) ** 2 for element in tree.iter())
    if pairs > MAX_SIBLING_PAIRS:
        most = max(len(element) for element in tree.iter())
        raise TooComplex(f"{most} elements in one; squared and summed over all elements that is more than "
                         f"{MAX_SIBLING_PAIRS}")


def quiet() -> None:
    """Silence what trafilatura says of pages without a text: they are in quarantine."""
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    logging.getLogger("htmldate").setLevel(logging.CRITICAL)


def serve(source: BinaryIO, sink: BinaryIO, cpu_seconds: int) -> None:
    """Answer pages until `source` ends."""
    import trafilatura  # noqa: F401, before the first page's time begins

    quiet()
    while len(head := source.read(REQUEST.size)) == REQUEST.size:
        charset_length, length = REQUEST.unpack(head)
        charset = source.read(charset_length).decode()
        page = source.read(length)
        if len(page) < length:
            return
        limit_cpu(cpu_seconds)
        kind, content = _answer(page, charset)
        sink.write(ANSWER.pack(kind, len(content)) + content)
        sink.flush()


def _answer(page: bytes, charset: str) -> tuple[bytes, bytes]:
    try:
        text = main_text(page, charset)
    except TooComplex as error:
        return COMPLEX, str(error).encode()
    except MemoryError:  # says nothing about the page; this process ends, and the caller sees that
        raise
    except Exception as error:  # a page is hostile input
        return FAILED, f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace")
    return (NOTHING, b"") if text is None else (TEXT, text.encode("utf-8", "surrogatepass"))


def limit_cpu(seconds: int) -> None:
    """Let the kernel end this process once it has used `seconds` more of processor time."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    until = int(time.process_time()) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (until if most == resource.RLIM_INFINITY else min(until, most), most))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pipeline's to answer; end of input ends this process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    serve(sys.stdin.buffer, answers, int(sys.argv[1]))
