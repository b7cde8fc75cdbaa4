"""The process that runs a model's code. Run as a file, without the package and without installed packages.

It reads a job from standard input (JSON), isolates itself, and writes a line: "ready", or why it cannot. Only then does
it run the code. Calls have their results written as lines, in a form that `text_of` makes; a program has the standard
output of its own. What the code should return never enters this process.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

READY, CANNOT = "ready", "cannot: "


def text_of(value: Any) -> str:
    """Return one text for values that are equal in Python: of numbers, texts, None, and lists, tuples, sets and
    dictionaries of them. Any other object has a text that is no value's. No code of the object runs.

    Args:
        value: any object.
    """
    kind = type(value)
    if kind is float and value.is_integer():
        return str(int(value))
    if kind in (bool, int):
        return str(int(value))
    if kind in (float, complex, bytes, str, type(None)):
        return ascii(value)
    if kind in (list, tuple):
        marks = "[]" if kind is list else "()"
        return marks[0] + ",".join(text_of(item) for item in value) + marks[1]
    if kind in (set, frozenset):
        return "{" + ",".join(sorted(text_of(item) for item in value)) + "}"
    if kind is dict:
        return "{:" + ",".join(sorted(f"{text_of(key)}:{text_of(item)}" for key, item in value.items())) + "}"
    return f"<{kind.__name__!a}>"


def main() -> None:
    """Read a job, isolate this process and run the code."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    isolation = importlib.import_module("isolation")
    del sys.path[0]
    job = json.loads(sys.stdin.buffer.read())
    _replace_input(job["input"] or "")
    program = job["calls"] is None
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    try:
        isolation.limit(job["cpu_seconds"], job["memory_bytes"], job["file_bytes"])
        if job["isolate"]:
            isolation.isolate(os.getcwd())
        else:
            isolation.no_processes()
    except (isolation.Impossible, OSError, ValueError) as error:
        results.write(f"{CANNOT}{error}\n")
        return
    results.write(f"{READY}\n")
    results.flush()
    space = {"__name__": "__main__" if program else "answer"}
    if program:
        results.close()
        exec(compile(job["code"], "answer.py", "exec"), space)
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    exec(compile(job["code"], "answer.py", "exec"), space)
    for call in job["calls"]:
        try:
            text = text_of(eval(call, space))
        except BaseException as error:
            text = f"!{type(error).__name__}"
        results.write(text + "\n")
        results.flush()


def _replace_input(text: str) -> None:
    """Make a text the standard input."""
    with open("input", "w+b") as file:
        os.unlink("input")
        file.write(text.encode())
        file.seek(0)
        os.dup2(file.fileno(), 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for the rest of the process


if __name__ == "__main__":
    main()
