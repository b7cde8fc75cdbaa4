"""A problem of a manifest: its place, its cause and a fix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """A finding of the lint."""

    resource: str
    """"RayCluster/tidewheel"."""
    path: str
    """Path of the field, such as spec.workerGroupSpecs[0].minReplicas."""
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.resource}: {self.path}: {self.what}\n  fix: {self.fix}"


def name_of(manifest: Manifest) -> str:
    """Return "Kind/name"; a generated name ends in "*"."""
    metadata = manifest.get("metadata") or {}
    name = metadata.get("name") or f"{metadata.get('generateName', '')}*"
    return f"{manifest.get('kind', '?')}/{name}"


def join(*keys: str | int) -> str:
    """Return a path of keys and indices as text: spec.containers[0].image, metadata.labels['ray.io/group']."""
    path = ""
    for key in keys:
        if isinstance(key, int):
            path += f"[{key}]"
        elif re.fullmatch(r"[\w-]+", key):
            path += f".{key}" if path else key
        else:
            path += f"[{key!r}]"
    return path


def get(value: Any, *keys: str | int, default: Any = None) -> Any:
    """Return the value at a path of keys and indices.

    Args:
        value: the object in which the path begins.
        keys: keys and indices of the path.
        default: value to return if the path ends early or leads to null.
    """
    for key in keys:
        if isinstance(value, dict) and isinstance(key, str):
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return default
    return default if value is None else value


def walk(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield every value of a manifest with its path, outer values first."""
    yield path, value
    items: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield from walk(inner, (*path, key))


def at(manifest: Manifest, path: tuple[str | int, ...], what: str, fix: str) -> Problem:
    """Return a problem of a field.

    Args:
        manifest: the object.
        path: path of the field in it.
        what: the problem.
        fix: the fix.
    """
    return Problem(name_of(manifest), join(*path), what, fix)
