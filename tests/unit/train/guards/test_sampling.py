"""Sampled steps are spread, the same for all, and checked on other nodes."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tidewheel.train.guards.sampling import is_sampled, shift


@given(st.integers(0, 1 << 40), st.sampled_from([1.0, 0.5, 0.1, 0.01]))
def test_one_step_of_each_period_is_sampled(seed: int, share: float):
    period = round(1 / share)
    sampled = [step for step in range(1, 20 * period + 1) if is_sampled(seed, step, share)]
    assert [(step - 1) // period for step in sampled] == list(range(20))
    assert all(after - before < 2 * period for before, after in itertools.pairwise(sampled))


def test_seeds_sample_other_steps():
    assert len({tuple(step for step in range(1, 2000) if is_sampled(seed, step, 0.01)) for seed in range(20)}) == 20


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 100))
def test_another_node_computes_where_there_is_one(nodes: int, on_each: int, step: int):
    of_rank = [rank // on_each for rank in range(nodes * on_each)]
    moved = shift(7, step, of_rank)
    size = len(of_rank)
    assert 0 <= moved < max(size, 1)
    assert (moved == 0) == (size == 1)
    if nodes > 1 and size <= 16:
        assert all(of_rank[rank] != of_rank[(rank + moved) % size] for rank in range(size))
    if size > 2:
        assert shift(7, step, of_rank, avoided=(moved,)) not in (0, moved)


def test_in_a_large_run_most_are_on_another_node():
    of_rank = [rank // 8 for rank in range(16384)]
    moved = shift(1, 5, of_rank)
    assert sum(of_rank[rank] != of_rank[(rank + moved) % 16384] for rank in range(16384)) == 16384
