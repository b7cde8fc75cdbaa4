"""Names of modules and of an adapter's parameters. Nothing here imports torch."""

from __future__ import annotations

import fnmatch
from collections.abc import Container, Mapping
from typing import TypeVar

T = TypeVar("T")
EXPERTS = ".experts"
"""End of the name of a module with the stacked matrices of experts."""
MARK = ".adapter."
"""In the name of every parameter of an adapter, and of no other."""


def by_module(values: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Return {module: {name of the parameter: value}} of an adapter's parameters.

    "blocks.0.ffn.experts.adapter.w1.a" is the parameter "a" of "blocks.0.ffn.experts.w1".

    Args:
        values: by their names in the whole model.
    """
    modules: dict[str, dict[str, T]] = {}
    for name, value in values.items():
        module, _, rest = name.partition(MARK)
        matrix, _, key = rest.rpartition(".")
        modules.setdefault(f"{module}.{matrix}" if matrix else module, {})[key] = value
    return modules


def parameter_name(module: str, key: str) -> str:
    """Return the name in the whole model of a parameter of `by_module`."""
    holder, _, matrix = module.rpartition(".")
    if holder.endswith(EXPERTS):
        return f"{holder}{MARK}{matrix}.{key}"
    return f"{module}{MARK}{key}"


def weight_name(module: str, weights: Container[str]) -> str | None:
    """Return the name of the matrix of a module of `by_module`; None: it has none.

    Args:
        module: its name in the whole model.
        weights: names of a model's parameters.
    """
    return next((name for name in (module, f"{module}.weight") if name in weights), None)


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches some neighbouring components of a module's name.

    "wq", "attention.w*" and "blocks.3" all match "blocks.3.attention.wq"; "w" does not.

    Args:
        pattern: components with `*` and `?`, joined by dots.
        name: of the module in the whole model.
    """
    wanted = pattern.split(".")
    components = name.split(".")
    for begin in range(len(components) - len(wanted) + 1):
        pairs = zip(components[begin:], wanted)
        if all(fnmatch.fnmatchcase(component, part) for component, part in pairs):
            return True
    return False


def first_match(values: Mapping[str, T], name: str, default: T) -> T:
    """Return the value of the first pattern that matches a module's name.

    Args:
        values: by pattern.
        name: of the module in the whole model.
        default: returned if none matches.
    """
    for pattern, value in values.items():
        if matches(pattern, name):
            return value
    return default
