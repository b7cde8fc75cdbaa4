"""Tests that the bits of the canonical sum depend on the leaves alone."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.train.reproducible.tree import TreeSum, cover, first_leaf


def recursive(leaves: list[np.float32], start: int = 0, level: int | None = None) -> np.float32 | None:
    """Compute the same tree from the top down in numpy: halves of 2^level leaves; the right one may be missing."""
    if level is None:
        level = max(0, (len(leaves) - 1).bit_length())
    if start >= len(leaves):
        return None
    if level == 0:
        return leaves[start]
    left, right = (recursive(leaves, start + half, level - 1) for half in (0, 1 << (level - 1)))
    return left if right is None else left + right


def values(count: int, seed: int) -> torch.Tensor:
    """Return fp32 numbers [count, 5] of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 5, generator=generator) * 10.0 ** torch.randint(-6, 6, (count, 5), generator=generator)


def tree_sum(leaves: torch.Tensor, order: list[int]) -> torch.Tensor:
    tree = TreeSum()
    for leaf in order:
        tree.add((0, leaf), leaves[leaf].clone())
    return tree.total()


@given(st.integers(1, 40), st.integers(0, 10**6), st.randoms())
def test_any_order_of_arrival_gives_the_same_bits(count, seed, random):
    leaves, order = values(count, seed), list(range(count))
    expected = np.array([recursive(list(column)) for column in leaves.numpy().T])
    random.shuffle(order)
    assert np.array_equal(tree_sum(leaves, order).numpy(), expected)


@given(st.integers(1, 40), st.integers(0, 10**6), st.data())
def test_any_assignment_of_leaves_to_ranks_gives_the_same_bits(count, seed, data):
    """Ranks with any leaves add theirs, and the remaining nodes are added in the end."""
    leaves = values(count, seed)
    owners = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    whole = TreeSum()
    for rank in range(5):
        part, mine = TreeSum(), [leaf for leaf in range(count) if owners[leaf] == rank]
        for leaf in mine:
            part.add((0, leaf), leaves[leaf].clone())
        assert [node for node, _ in part.nodes()] == cover(mine)
        for node, value in part.nodes():
            whole.add(node, value)
    assert torch.equal(whole.total(), tree_sum(leaves, list(range(count))))


@given(st.integers(1, 200), st.integers(0, 200))
def test_the_remaining_nodes_cover_the_leaves_with_few_nodes(count, start):
    nodes = cover(range(start, start + count))
    assert [leaf for node in nodes for leaf in range(first_leaf(node), first_leaf(node) + (1 << node[0]))] == list(
        range(start, start + count))
    assert len(nodes) <= 2 * count.bit_length()
    assert len(cover(range(count))) <= count.bit_length(), "a counter from 0 has a node for each 1 bit"


def test_other_sums_depend_on_the_order():
    """Without this the tests above could not fail."""
    leaves = values(12, 0)
    assert not torch.equal(leaves.sum(dim=0), tree_sum(leaves, list(range(12)))) or not torch.equal(
        leaves.flip(0).cumsum(dim=0)[-1], tree_sum(leaves, list(range(12))))
