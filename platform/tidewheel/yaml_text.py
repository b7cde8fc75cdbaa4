"""YAML from people: plain values, no key twice, and aliases that cannot grow beyond memory.

A few hundred bytes of nested aliases stand for billions of values. Loading shares them; whatever then walks the value,
to print or to check it, never ends. So documents are measured before they are built.
"""

from __future__ import annotations

from typing import Any

import yaml

MAX_ALIASED = 1_000_000
"""Values and characters that the aliases of one document may stand for, beyond what is written out. A configuration
repeats a few hundred."""
MAX_DEPTH = 100
"""Lists and mappings inside each other. PyYAML takes time that grows with the square of the depth."""


class _Checked:
    """Checks for a loader of PyYAML, before it builds values."""

    def construct_document(self, node: yaml.Node) -> Any:
        written: dict[int, int] = {}
        expanded = _expanded(node, {}, written)
        if expanded - sum(written.values()) > MAX_ALIASED:
            raise yaml.constructor.ConstructorError(None, None, f"its aliases stand for more than {MAX_ALIASED:,} "
                                                    "values and characters", node.start_mark)
        return super().construct_document(node)  # type: ignore[misc]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} is there twice",
                                                            key.start_mark)
                seen.add(key.value)
        return dict(super().construct_mapping(node, deep))  # type: ignore[misc]


class _Loader(_Checked, yaml.SafeLoader):
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self._depth == MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"it is nested deeper than {MAX_DEPTH} levels",
                                              self.peek_event().start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _FastLoader(_Checked, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """For generated manifests of thousands of lines; its messages say less."""


def load(text: str) -> Any:
    """Return the value of one document.

    Raises:
        yaml.YAMLError: not YAML, a key is there twice, it is nested too deep, or its aliases are a bomb.
    """
    return yaml.load(text, _Loader)


def load_all(text: str) -> list[Any]:
    """Return the values of all documents; see `load`."""
    try:
        return list(yaml.load_all(text, _FastLoader))
    except RecursionError:  # the C parser has no hook to count the depth in, and takes linear time
        raise yaml.YAMLError("it is nested too deep") from None


def _expanded(node: yaml.Node, sizes: dict[int, int], written: dict[int, int]) -> int:
    """Size of a node with its aliases written out; `written` gets the own size of each node, once."""
    key = id(node)
    if key in sizes:
        if sizes[key] < 0:
            raise yaml.constructor.ConstructorError(None, None, "a value that contains itself", node.start_mark)
        return sizes[key]
    sizes[key] = -1  # until its content is measured
    written[key] = 1
    content = 0
    if isinstance(node, yaml.ScalarNode):
        written[key] += len(node.value)
    elif isinstance(node, yaml.MappingNode):
        content = sum(_expanded(part, sizes, written) for pair in node.value for part in pair)
    elif isinstance(node, yaml.SequenceNode):
        content = sum(_expanded(part, sizes, written) for part in node.value)
    sizes[key] = written[key] + content
    return sizes[key]
