"""A sum of tensors whose rounding does not depend on who added which of them first.

The terms are the leaves of one binary tree, and a node is the sum of its two halves: node (level, index) covers leaves
[index 2^level, (index + 1) 2^level). Whoever has two sibling nodes adds them, at any time and on any rank; as
floating-point addition commutes, the bits of every node follow from the leaves alone. When their number is no power of
two, what is left at the end is added from the last node to the first. This is a binary counter: of k leaves that came
in order at most log2(k) + 1 partial sums are kept.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

Node = tuple[int, int]
"""(level, index)."""


def sibling(node: Node) -> Node:
    """The other half of the same parent."""
    return node[0], node[1] ^ 1


def parent(node: Node) -> Node:
    """The node that `node` is a half of."""
    return node[0] + 1, node[1] >> 1


def first_leaf(node: Node) -> int:
    """The first leaf that `node` covers."""
    return node[1] << node[0]


def cover(leaves: Iterable[int]) -> list[Node]:
    """The fewest nodes that cover exactly `leaves`, in the order of the leaves: what is left when they are added."""
    held: set[Node] = set()
    for leaf in leaves:
        node = (0, leaf)
        while (other := sibling(node)) in held:
            held.remove(other)
            node = parent(node)
        held.add(node)
    return sorted(held, key=first_leaf)


class TreeSum:
    """A sum under way. Tensors that are given to it are its own from then on: it adds in place."""

    def __init__(self) -> None:
        self._held: dict[Node, torch.Tensor] = {}

    def add(self, node: Node, value: torch.Tensor) -> None:
        """One more node, each leaf once; merged with its sibling, and that with its own, as far as they are here."""
        while (other := sibling(node)) in self._held:
            value = self._held.pop(other).add_(value)
            node = parent(node)
        self._held[node] = value

    def nodes(self) -> list[tuple[Node, torch.Tensor]]:
        """What is here, merged, in the order of the leaves; for the leaves that were added it is their `cover`."""
        return sorted(self._held.items(), key=lambda item: first_leaf(item[0]))

    def replace(self, node: Node, value: torch.Tensor) -> None:
        """Keep the sum of `node` in other memory."""
        self._held[node] = value

    def total(self) -> torch.Tensor:
        """The sum of everything, which is empty afterwards; at least one node must be here."""
        *others, (_, total) = self.nodes()
        self._held = {}
        for _, value in reversed(others):
            total = value.add_(total)
        return total
