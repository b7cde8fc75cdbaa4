"""The graph of a workflow: steps in the order in which they depend on each other, each with its content-addressed key.

A key is the hash of a step's kind, name, deciding configuration, what it reads from outside, and the keys of the steps
it reads. Equal keys mean equal results, so a step whose key is published is never run again, and a change reaches
exactly the steps behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidewheel.config import recipe_hash
from tidewheel.errors import ConfigError
from tidewheel.workflow.kinds import KINDS, Entry

KEY_DIGITS = 12


@dataclass(frozen=True)
class Node:
    """One step of a graph."""

    name: str
    kind: str
    entry: Entry
    recipe: Any
    content: Any
    needs: Mapping[str, str]
    """Names of the steps it reads, by role."""
    key: str
    place: str
    """URI of what it makes."""

    @property
    def id(self) -> str:
        """Name and key: of its record, lease and log."""
        return f"{self.name}-{self.key}"


def specify(steps: Sequence[Any]) -> list[dict[str, Any]]:
    """Entries of steps and of all they read, each once, those first that others read.

    Raises:
        ConfigError: two different steps have one name.
    """
    entries: dict[str, dict[str, Any]] = {}
    seen: dict[int, str] = {}

    def visit(step: Any) -> str:
        if id(step) in seen:
            return seen[id(step)]
        needs = {role: visit(each) for role, each in step.inputs().items()}
        entry = {**step.entry(), "inputs": needs}
        name: str = entry["name"]
        if entries.setdefault(name, entry) != entry:
            raise ConfigError(f"two different steps have the name {name!r}", where="tw.Workflow",
                              mend="give one another name; a tw.Train is named by run.id")
        seen[id(step)] = name
        return name

    for step in steps:
        visit(step)
    return list(entries.values())


def resolve(entries: Sequence[Entry], *, output: str, input: str) -> list[Node]:
    """The graph of these entries. Reads the identity of every file that a step reads from outside.

    Args:
        output: URI that all places are below.
        input: URI that relative paths of the steps are below.

    Raises:
        ConfigError: a step is of an unknown kind, or reads one that is not there.
        StorageError, InputError: what a step reads is not there.
    """
    nodes: dict[str, Node] = {}
    for entry in entries:
        name, kind = entry["name"], KINDS.get(entry["kind"])
        if kind is None:
            raise ConfigError(f"step {name!r} is of the unknown kind {entry['kind']!r}", where="workflow",
                              mend=f"one of {', '.join(KINDS)}")
        if missing := [need for need in entry["inputs"].values() if need not in nodes]:
            raise ConfigError(f"step {name!r} reads {missing[0]!r}, which does not come before it", where="workflow",
                              mend="the file was changed by hand or is of another version: submit the workflow again")
        recipe, content = kind.recipe(entry), kind.content(entry, input, output)
        key = recipe_hash({"kind": entry["kind"], "name": name, "recipe": recipe, "content": content,
                           "inputs": {role: nodes[need].key for role, need in entry["inputs"].items()}})[:KEY_DIGITS]
        nodes[name] = Node(name, entry["kind"], entry, recipe, content, dict(entry["inputs"]), key,
                           kind.place(output, entry, key))
    return list(nodes.values())


def difference(old: Any, new: Any, path: str = "") -> list[str]:
    """Dotted keys in which two JSON values differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return [found for key in sorted({*old, *new})
                for found in difference(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [found for place, (one, other) in enumerate(zip(old, new, strict=True))
                for found in difference(one, other, f"{path}.{place}" if path else str(place))]
    return [] if old == new else [path]
