"""Extract the main text of HTML pages, in a separate process so that no page can stop a pipeline.

Run as a file, this module is that process (`page_process` starts it): it reads pages from standard input and answers
with their texts. It imports nothing from the package, so that it starts quickly.

A page with more tags, or more attributes in a tag, than any real page is refused before libxml2 parses it. These limits
are counts, so every machine refuses the same pages. For all else the kernel enforces a limit of CPU time, also inside
C code. The limit is wide: a page within the counts takes at most a fifth of it.
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
"""Maximum CPU time for one page, in seconds."""
MAX_TAGS = 200_000
"""Maximum number of start tags and comments in a page. trafilatura takes about 0.1 ms for each."""
MAX_ATTRIBUTE_PAIRS = 400_000_000
"""Maximum sum over all tags of their squared number of attributes: libxml2 compares each attribute of a tag with those
before it. A single tag may have 20,000."""
MAX_SIBLING_PAIRS = 400_000_000
"""Maximum sum over all elements of their squared number of children: trafilatura walks all children for each child."""
SCAN_FACTOR = 16
"""Maximum number of characters scanned per character of the page while counting attributes."""

REQUEST = struct.Struct("<IQ")
"""Header of a request: the lengths of the charset and the page, which follow."""
ANSWER = struct.Struct("<cQ")
"""Header of an answer: TEXT, NOTHING, COMPLEX or FAILED, and the length of the text or message that follows."""
TEXT, NOTHING, COMPLEX, FAILED = b"t", b"n", b"c", b"f"

_TAG = re.compile(r"<[A-Za-z!?]")
_ATTRIBUTE = (r"[ \t\n\f\r/]*+[^ \t\n\f\r/>][^ \t\n\f\r/>=]*+"
              r"""(?:[ \t\n\f\r]*+=[ \t\n\f\r]*+(?:"[^"]*+(?:"|\Z)|'[^']*+(?:'|\Z)|[^ \t\n\f\r>]*+))?+""")
_ONE = re.compile(_ATTRIBUTE)
_START_TAG = re.compile(rf"<[A-Za-z][^ \t\n\f\r/>]*+(?:{_ATTRIBUTE})*+")
_FEW_BYTES = 4096
"""Attributes of shorter tags are not counted: such a tag has at most half as many."""


class TooComplex(Exception):
    """A page over one of the limits; the message says which."""


def main_text(html: bytes, charset: str = "") -> str | None:
    """Return the main text of a page, without navigation, comments and boilerplate; None if it has none.

    trafilatura (Barbaresi 2021) favours precision here, as for FineWeb. Its `deduplicate` is off: it remembers earlier
    pages, so the text would depend on the order of reading.

    Args:
        html: the page.
        charset: the charset from the HTTP header; if it is "" or wrong, the page decides.

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
    """Return the page decoded as trafilatura decodes it, so that the counts apply to what libxml2 parses."""
    from trafilatura.utils import decode_file

    if charset:
        try:
            return html.decode(charset)
        except (UnicodeDecodeError, LookupError):
            pass  # the page's own declaration decides, or its bytes
    return decode_file(html)


def check_tags(page: str) -> int:
    """Return the number of tags in a page.

    Every `<` before a letter counts as the beginning of a tag, even inside scripts, comments and values. Real tags are
    parsed as libxml2 parses them, so no page can hide its attributes.

    Raises:
        TooComplex: the page has too many tags, or too many attributes in its tags.
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
    """Silence trafilatura's messages about pages without text, which go to quarantine."""
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    logging.getLogger("htmldate").setLevel(logging.CRITICAL)


def serve(source: BinaryIO, sink: BinaryIO, cpu_seconds: int) -> None:
    """Answer requests until `source` ends.

    Args:
        source: stream of requests.
        sink: stream for the answers.
        cpu_seconds: maximum CPU time for one page, in seconds.
    """
    import trafilatura  # noqa: F401, imported before the time of the first page begins

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
    except MemoryError:  # not the page's fault: this process ends, and the caller notices
        raise
    except Exception as error:  # a page is hostile input
        return FAILED, f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace")
    return (NOTHING, b"") if text is None else (TEXT, text.encode("utf-8", "surrogatepass"))


def limit_cpu(seconds: int) -> None:
    """Let the kernel kill this process once it has used `seconds` more of CPU time."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    until = int(time.process_time()) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (until if most == resource.RLIM_INFINITY else min(until, most), most))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pipeline handles Ctrl-C; this process ends with its input
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep what libraries print out of the answers
    serve(sys.stdin.buffer, answers, int(sys.argv[1]))
