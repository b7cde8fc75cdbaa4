"""Tests of the shares of micro-batches and their leaves in the canonical sum."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidewheel.train.micro_batch_share import MicroBatchShare
from tidewheel.train.reproducible.gradient_order import GradientOrder
from tidewheel.train.reproducible.tree import first_leaf

layouts = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.booleans())
"""Copies, shards, virtual ranks per data rank, micro-batches per virtual rank, streams."""


@given(layouts)
def test_shares_are_a_partition(layout):
    copies, shards, each, parts, streams = layout
    size, total = copies * shards, copies * shards * each * parts
    shares = [MicroBatchShare(rank, size, shards if streams else 1).of(total) for rank in range(size)]
    assert sorted(number for share in shares for number in share) == list(range(total))
    assert {len(share) for share in shares} == {each * parts}


@given(layouts, st.integers(1, 2))
def test_every_virtual_rank_gets_all_of_its_micro_batches_in_order(layout, contexts):
    copies, shards, each, parts, streams = layout
    size = copies * shards
    virtual = size * each
    order = GradientOrder(virtual, MicroBatchShare(0, size, shards if streams else 1), streams, contexts)
    arrived: dict[int, list[int]] = {}
    for number in range(each * parts):
        order.begin(number, each * parts)
        assert order.parts == parts
        for rank in range(size):
            for context in range(contexts):
                micro = MicroBatchShare(rank, size, order.share.stride).of(virtual * parts)[number]
                arrived.setdefault(order.leaf((rank, context)), []).append(micro % parts)
    assert order.last
    assert arrived == {leaf: list(range(parts)) for leaf in range(virtual * contexts)}


@given(layouts, st.integers(1, 2))
def test_every_micro_batch_has_its_own_loss_entry(layout, contexts):
    copies, shards, each, parts, streams = layout
    size, count = copies * shards, each * parts
    stride = shards if streams else 1
    orders = [GradientOrder(size * each, MicroBatchShare(rank, size, stride), streams, contexts, context)
              for rank in range(size) for context in range(contexts)]
    entries = [order.entry(number, count) for order in orders for number in range(count)]
    assert sorted(entries) == list(range(orders[0].entries(count)))


def test_ranks_keep_the_fewest_nodes_at_the_end_of_a_step():
    """With twelve virtual ranks, a power of two of them is one node and three are two nodes."""
    def covers(size: int) -> list[int]:
        order = GradientOrder(12, MicroBatchShare(0, size))
        results = [order.cover([(rank, 0)]) for rank in range(size)]
        assert sum(1 << level for nodes in results for level, _ in nodes) == 12
        assert sorted(first_leaf(node) for nodes in results for node in nodes) == [
            first_leaf(node) for nodes in results for node in nodes]
        return [len(nodes) for nodes in results]

    assert covers(3) == [1, 1, 1]
    assert covers(4) == [2, 2, 2, 2]
    assert covers(2) == [2, 2]
    assert covers(12) == [1] * 12
