"""A sum of tensors whose rounding does not depend on the order in which ranks add them.

The terms are the leaves of one binary tree, and a node is the sum of its two halves. Node (level, index) covers leaves
[index 2^level, (index + 1) 2^level). Two sibling nodes may be added at any time and on any rank. Floating-point
addition commutes, so the bits of every node depend on the leaves alone. If the number of leaves is not a power of two,
the remaining nodes are added from the last to the first. This is a binary counter: after k leaves in order, it holds at
most log2(k) + 1 partial sums.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

Node = tuple[int, int]
"""(level, index)."""


def sibling(node: Node) -> Node:
    """Return the other half of the same parent."""
    return node[0], node[1] ^ 1


def parent(node: Node) -> Node:
    """Return the parent of `node`."""
    return node[0] + 1, node[1] >> 1


def first_leaf(node: Node) -> int:
    """Return the first leaf that `node` covers."""
    return node[1] << node[0]


def cover(leaves: Iterable[int]) -> list[Node]:
    """Return the fewest nodes that cover exactly `leaves`, in their order: what remains when they are added."""
    held: set[Node] = set()
    for leaf in leaves:
        node = (0, leaf)
        while (other := sibling(node)) in held:
            held.remove(other)
            node = parent(node)
        held.add(node)
    return sorted(held, key=first_leaf)


class TreeSum:
    """A partial sum. It adds in place and owns the tensors that it is given."""

    def __init__(self) -> None:
        self._held: dict[Node, torch.Tensor] = {}

    def add(self, node: Node, value: torch.Tensor) -> None:
        """Add a node and merge it with its sibling; repeat with the result while a sibling exists."""
        while (other := sibling(node)) in self._held:
            value = self._held.pop(other).add_(value)
            node = parent(node)
        self._held[node] = value

    def nodes(self) -> list[tuple[Node, torch.Tensor]]:
        """Return the merged nodes with their sums, in the order of the leaves: the `cover` of the leaves added."""
        return sorted(self._held.items(), key=lambda item: first_leaf(item[0]))

    def replace(self, node: Node, value: torch.Tensor) -> None:
        """Replace the memory of the sum of `node`."""
        self._held[node] = value

    def total(self) -> torch.Tensor:
        """Return the sum of all nodes (at least one), and clear the tree."""
        *others, (_, total) = self.nodes()
        self._held = {}
        for _, value in reversed(others):
            total = value.add_(total)
        return total
