"""The graph of a workflow: steps in the order of their dependencies, each with its content-addressed key.

A key is the hash of a step's kind, name, recipe, the content it reads from outside the workflow, and the keys of the
steps it reads. Equal keys mean equal results: a step with a published key never runs again, and a change reaches
exactly the steps behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidewheel.config import Setting, recipe_hash
from tidewheel.errors import ConfigError
from tidewheel.workflow.kinds import KINDS
from tidewheel.workflow.step_kind import Entry
from tidewheel.workflow.steps import WorkflowStep

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
    """Names of the steps that it reads, by role."""
    key: str
    place: str
    """URI of its output."""

    @property
    def id(self) -> str:
        """Name and key, which name its record, lease and log."""
        return f"{self.name}-{self.key}"


def specify(steps: Sequence[WorkflowStep]) -> list[dict[str, Setting]]:
    """Return the entries of steps and of everything they read, each once, after the entries that it reads.

    Raises:
        ConfigError: two different steps have one name.
    """
    entries: dict[str, dict[str, Setting]] = {}
    seen: dict[int, str] = {}

    def visit(step: WorkflowStep) -> str:
        if id(step) in seen:
            return seen[id(step)]
        needs = {role: visit(read) for role, read in step.inputs().items()}
        entry: dict[str, Setting] = {**step.entry(), "inputs": needs}
        name = str(entry["name"])
        if entries.setdefault(name, entry) != entry:
            raise ConfigError(f"two different steps have the name {name!r}", where="tw.Workflow",
                              fix="rename one of them; the name of a tw.Train is its run.id")
        seen[id(step)] = name
        return name

    for step in steps:
        visit(step)
    return list(entries.values())


def resolve(entries: Sequence[Entry], *, output: str, input: str) -> list[Node]:
    """Return the graph of these entries. Reads the identity of every file that a step reads from outside.

    Args:
        entries: entries, as `specify` returns them.
        output: URI that all outputs are below.
        input: URI that relative paths of the steps are below.

    Raises:
        ConfigError: a step has an unknown kind, or reads a step that does not come before it.
        StorageError, InputError: a file that a step reads does not exist.
    """
    nodes: dict[str, Node] = {}
    for entry in entries:
        name = entry["name"]
        kind = KINDS.get(entry["kind"])
        if kind is None:
            raise ConfigError(f"step {name!r} has the unknown kind {entry['kind']!r}", where="workflow",
                              fix=f"use one of {', '.join(KINDS)}")
        if missing := [need for need in entry["inputs"].values() if need not in nodes]:
            raise ConfigError(f"step {name!r} reads {missing[0]!r}, which does not come before it", where="workflow",
                              fix="the file was changed by hand or is of another version: submit the workflow again")
        recipe = kind.recipe(entry)
        content = kind.content(entry, input, output)
        key = recipe_hash({"kind": entry["kind"], "name": name, "recipe": recipe, "content": content,
                           "inputs": {role: nodes[need].key for role, need in entry["inputs"].items()}})[:KEY_DIGITS]
        nodes[name] = Node(name, entry["kind"], entry, recipe, content, dict(entry["inputs"]), key,
                           kind.place(output, entry, key))
    return list(nodes.values())


def difference(old: Any, new: Any, path: str = "") -> list[str]:
    """Return the dotted keys in which two JSON values differ.

    Args:
        old: a JSON value.
        new: another one.
        path: key of both, which starts the returned keys.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        pairs = [(str(key), old.get(key), new.get(key)) for key in sorted({*old, *new})]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(str(index), old[index], new[index]) for index in range(len(old))]
    else:
        return [] if old == new else [path]
    changed = []
    for key, before, after in pairs:
        changed += difference(before, after, f"{path}.{key}" if path else key)
    return changed
