"""Patterns of module names. Nothing here imports torch."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


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
