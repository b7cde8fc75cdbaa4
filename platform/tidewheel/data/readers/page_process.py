"""Extract the text of pages in a child process: libxml2 cannot be interrupted, but a process can be killed.

    reader = PageProcess()
    result = reader.read(html, "utf-8")      # the text, or the reason why there is none

The kernel kills the process when a page takes too much CPU time. Wall-clock time does not count, so a busy or paused
machine refuses no page.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import lru_cache

from tidewheel.data.readers import page_text
from tidewheel.errors import InputError

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)


@dataclass(frozen=True)
class PageText:
    """The text of a page, or a reason of `quarantine.REASONS` and a detail."""

    text: str | None
    reason: str = ""
    detail: str = ""


class PageProcess:
    """A child process that extracts the text of pages. It starts with the first page. Thread-safe.

    Args:
        cpu_seconds: maximum CPU time for one page, in seconds.
    """

    def __init__(self, cpu_seconds: int = page_text.CPU_SECONDS) -> None:
        self._cpu_seconds = cpu_seconds
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The process id of the child; None while no child runs."""
        return self._child.pid if self._child else None

    def read(self, html: bytes, charset: str = "") -> PageText:
        """Return the main text of a page, or the reason why there is none. Restart the child if it dies.

        Raises:
            InputError: the child was killed twice, so the machine has too little memory for the page.
        """
        with self._lock:
            for attempt in ("first", "second"):
                child = self._running()
                try:
                    return self._ask(child, html, charset)
                except (BrokenPipeError, EOFError):
                    status = self._ended()
                if status == -signal.SIGXCPU:
                    return PageText(None, "page_too_slow", f"more than {self._cpu_seconds} s of processor time")
                if -status in _CRASHES and attempt == "second":
                    return PageText(None, "page_breaks_parser", signal.Signals(-status).name)
        raise InputError(f"the process that extracts text from pages died twice on one page (status {status}), usually "
                         "for lack of memory", where="read.format",
                         fix="lower read.max_record_bytes, or use a machine with more memory")

    def close(self) -> None:
        """Kill the child."""
        with self._lock:
            if self._child is not None:
                self._child.kill()
                self._ended()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
            self._child = subprocess.Popen(
                [sys.executable, "-P", page_text.__file__, str(self._cpu_seconds)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
        return self._child

    def _ask(self, child: subprocess.Popen[bytes], html: bytes, charset: str) -> PageText:
        name = charset.encode("utf-8", "replace")
        assert child.stdin is not None
        child.stdin.write(page_text.REQUEST.pack(len(name), len(html)) + name)
        child.stdin.write(html)
        child.stdin.flush()
        kind, length = page_text.ANSWER.unpack(_exactly(child, page_text.ANSWER.size))
        content = _exactly(child, length)
        if kind == page_text.TEXT:
            return PageText(content.decode("utf-8", "surrogatepass"))
        if kind == page_text.COMPLEX:
            return PageText(None, "page_too_complex", content.decode())
        return PageText(None, "no_main_text", content.decode())

    def _ended(self) -> int:
        child, self._child = self._child, None
        assert child is not None
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        return child.wait()


def _exactly(child: subprocess.Popen[bytes], length: int) -> bytes:
    assert child.stdout is not None
    content = child.stdout.read(length)
    if len(content) < length:
        raise EOFError
    return content


@lru_cache(maxsize=1)
def _of_process(pid: int) -> PageProcess:
    reader = PageProcess()
    atexit.register(reader.close)
    return reader


def page_process() -> PageProcess:
    """Return the `PageProcess` of this process."""
    return _of_process(os.getpid())
