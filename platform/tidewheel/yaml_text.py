"""Load YAML that people write: plain values, no duplicate keys, and no aliases that expand beyond memory.

A few hundred bytes of nested aliases can stand for billions of values. Loading shares them, but code that walks the
value, to print or to check it, never ends. So this module measures a document before it builds values.
"""

from __future__ import annotations

from typing import Any

import yaml

MAX_ALIASED = 1_000_000
"""Values and characters that the aliases of one document may add. The aliases of a usual configuration add a few
hundred."""
MAX_DEPTH = 100
"""Nesting depth of lists and mappings. PyYAML's time grows with the square of the depth."""


class _Checked:
    """Mix-in that checks a document before PyYAML builds its values."""

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
                    raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} occurs twice",
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
    """Loader for generated manifests of thousands of lines, in C; its error messages are shorter."""


def load(text: str) -> Any:
    """Return the value of one document.

    Raises:
        yaml.YAMLError: the text is not YAML, a key occurs twice, values are nested too deeply, or aliases expand to
            too much.
    """
    return yaml.load(text, _Loader)


def load_all(text: str) -> list[Any]:
    """Return the values of all documents.

    Raises:
        yaml.YAMLError: as in `load`.
    """
    try:
        return list(yaml.load_all(text, _FastLoader))
    except RecursionError:  # the C parser has no hook that could count the depth; its time is linear
        raise yaml.YAMLError("it is nested too deep") from None


def _expanded(node: yaml.Node, sizes: dict[int, int], written: dict[int, int]) -> int:
    """Return the size of a node with its aliases expanded; put each node's own size into `written`."""
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
