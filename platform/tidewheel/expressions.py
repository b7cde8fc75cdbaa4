"""Regular expressions from other people's files, with a limit on the processor time that they take.

    findall(r"(\\d+)", text)
    sub(r"\\s+", " ", text)
    first_matches(patterns, texts)

Python's `re` can take exponential time, and only a signal to the main thread can interrupt it. So a child process of
this process runs it, and the kernel ends the child when a request has used `SECONDS` of its processor time; a busy
machine changes no result. The child starts with the first request, in some 20 ms, and answers one at a time, in some
50 microseconds. It ends with this process. Run as a script, this file is the child; it imports nothing from the
package, so that it starts quickly.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

SECONDS = 2
"""Processor time of a request, rounded up to a whole second of the child's."""
MEMORY_BYTES = 1 << 30
"""Data and heap of the child."""
_lock = threading.Lock()
_child: subprocess.Popen[bytes] | None = None


class ExpressionError(ValueError):
    """An expression that is not valid, or takes too much time or memory; says which, and quotes it."""


def check(pattern: str) -> None:
    """Check that an expression is valid.

    Raises:
        ExpressionError: it is not.
    """
    _ask("check", pattern)


def findall(pattern: str, text: str) -> list[Any]:
    """Return `re.findall(pattern, text)`.

    Raises:
        ExpressionError: the expression is not valid, or takes too much time or memory.
    """
    return [tuple(groups) if isinstance(groups, list) else groups for groups in _ask("findall", pattern, text)]


def sub(pattern: str, replacement: str, text: str, count: int = 0) -> str:
    """Return `re.sub(pattern, replacement, text, count)`.

    Args:
        pattern: see `re.sub`, also for the other arguments.
        replacement: text with references to groups.
        text: to search.
        count: most replacements; 0: all.

    Raises:
        ExpressionError: the expression or the replacement is not valid, or takes too much time or memory.
    """
    replaced: str = _ask("sub", pattern, replacement, text, count)
    return replaced


def first_matches(patterns: Sequence[str], texts: Sequence[str]) -> list[int | None]:
    """Return, for each text, the index of the first expression that `re.match`es it; None if none does.

    Raises:
        ExpressionError: an expression is not valid, or they take too much time or memory.
    """
    indices: list[int | None] = _ask("first_matches", list(patterns), list(texts)) if patterns else [None] * len(texts)
    return indices


def _ask(method: str, *arguments: Any) -> Any:
    """Return the child's answer to a request."""
    global _child
    with _lock:
        if _child is None:
            _child = subprocess.Popen([sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, start_new_session=True)
        child = _child
        assert child.stdin is not None
        assert child.stdout is not None
        line, status = b"", 0
        try:
            child.stdin.write(json.dumps([SECONDS, method, *arguments]).encode() + b"\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            pass  # the child has ended
        finally:
            if not line.endswith(b"\n"):  # also at Ctrl-C: the next answer would be that of this request
                status = _end()
    if not line.endswith(b"\n"):
        why = (f"takes more than {SECONDS} s of processor time" if status == -signal.SIGXCPU else
               f"ended its process (status {status})")
        raise ExpressionError(f"the regular expression {_quoted(arguments[0])} {why}")
    answer = json.loads(line)
    if "error" in answer:
        raise ExpressionError(f"the regular expression {_quoted(arguments[0])} {answer['error']}")
    return answer["result"]


def _quoted(pattern: Any) -> str:
    text = repr(pattern) if isinstance(pattern, str) else " or ".join(map(repr, pattern))
    return text if len(text) <= 200 else text[:199] + "…"


def _end() -> int:
    """End the child, if there is one, and return its status."""
    global _child
    child, _child = _child, None
    if child is None:
        return 0
    child.kill()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except BrokenPipeError:
            pass  # what was not written is of no use now
    return child.wait()


def _forget() -> None:
    """Leave the child to the process that started it, after a fork."""
    global _child, _lock
    _child, _lock = None, threading.Lock()


def _answer(method: str, arguments: list[Any]) -> Any:
    if method == "findall":
        return re.findall(*arguments)
    if method == "sub":
        pattern, replacement, text, count = arguments
        return re.sub(pattern, replacement, text, count=count)
    if method == "check":
        re.compile(*arguments)
        return None
    patterns, texts = arguments
    indices: list[int | None] = [None] * len(texts)
    for number, pattern in enumerate(patterns):
        match = re.compile(pattern).match
        for index, text in enumerate(texts):
            if indices[index] is None and match(text):
                indices[index] = number
    return indices


def main() -> None:
    """Answer requests until standard input ends."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin.buffer:
        seconds, method, *arguments = json.loads(line)
        until = int(time.process_time()) + 1 + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (until if most == resource.RLIM_INFINITY else min(until, most), most))
        try:
            answer = {"result": _answer(method, arguments)}
            text = json.dumps(answer)
        except (re.error, IndexError) as error:
            text = json.dumps({"error": f"is not valid ({error})"})
        except RecursionError:
            text = json.dumps({"error": "is not valid (nested too deeply)"})
        except MemoryError:
            text = json.dumps({"error": f"takes more than {MEMORY_BYTES >> 20} MiB of memory"})
        sys.stdout.buffer.write(text.encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
else:
    atexit.register(_end)
    os.register_at_fork(after_in_child=_forget)
