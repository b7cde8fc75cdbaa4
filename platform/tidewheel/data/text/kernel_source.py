"""Digest of everything that decides a kernel's machine code: its source, that of all callees, and their constants.

The digest tells whether stored machine code belongs to the current source. It does not depend on the version of Python,
nor on other parts of a file.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any

import numpy as np


def digest(function: Callable[..., Any]) -> str:
    """Return the SHA-256 digest of a kernel's source, in hex.

    Raises:
        OSError: there is no source file.
        TypeError: the kernel reads a global that is not a number, string, module or function.
    """
    sources: dict[str, str] = {}
    _visit(function, sources)
    whole = hashlib.sha256()
    for name, content in sorted(sources.items()):  # the order of names in the code differs between Python versions
        whole.update(f"{len(name)} {len(content)} {name}{content}".encode())
    return whole.hexdigest()


def _visit(function: Callable[..., Any], sources: dict[str, str]) -> None:
    """Add the source of a function and of its callees."""
    own = f"{function.__module__}.{function.__qualname__}{_closure(function)}"
    if own in sources:
        return
    sources[own] = inspect.getsource(function)
    for name in dict.fromkeys(_names(function.__code__)):
        if name not in function.__globals__:
            continue  # an attribute, or a builtin
        value = function.__globals__[name]
        inner = _function_of(value)
        if inner is not None:
            _visit(inner, sources)
        elif not (isinstance(value, (ModuleType, type)) or type(value).__module__.startswith(("numba.", "llvmlite."))):
            sources[f"{own}:{name}"] = _constant(name, value)


def _function_of(value: Any) -> Any:
    """Return the Python function of a kernel, a numba function or an intrinsic; None for anything else."""
    for attribute in ("py_func", "_defn"):
        inner = getattr(value, attribute, None)
        if inspect.isfunction(inner):
            return inner
    return value if inspect.isfunction(value) else None


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _closure(function: Callable[..., Any]) -> str:
    """Return the closure of an intrinsic, which distinguishes two intrinsics made by one function."""
    cells = getattr(function, "__closure__", None) or ()
    return "".join(f"<{cell.cell_contents!r}>" for cell in cells if not inspect.isfunction(cell.cell_contents))


def _constant(name: str, value: Any) -> str:
    if isinstance(value, (bool, int, np.integer)):
        return f"{type(value).__name__} {int(value)}"
    if isinstance(value, (float, str, bytes)):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, tuple):
        return " ".join(_constant(name, inner) for inner in value)
    raise TypeError(f"a kernel reads the global {name}, {type(value).__name__}: pass it as an argument")
