"""The order is an exact bijection for any set, local, well mixed, and a function of its arguments alone."""

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.shards.helpers import write_set
from tidewheel.shards.order import Order, permute
from tidewheel.shards.source import Source

COUNTS = st.lists(st.integers(0, 70), min_size=1, max_size=12).filter(any)


@given(COUNTS, st.integers(-(1 << 70), 1 << 70), st.integers(1, 40), st.integers(1, 9), st.integers(0, 3))
@examples(100)
def test_each_row_once_in_each_epoch(counts: list[int], seed: int, block: int, window: int, epoch: int):
    order = Order(counts, seed, block_rows=block, window_blocks=window)
    total = sum(counts)
    shards, rows = order.locate(np.arange(epoch * total, (epoch + 1) * total))
    assert sorted(zip(shards.tolist(), rows.tolist())) == [(s, r) for s, n in enumerate(counts) for r in range(n)]


@given(st.integers(1, 500), st.integers(0, (1 << 64) - 1))
@settings(max_examples=200, deadline=None)
def test_permute_is_a_bijection(size: int, key: int):
    assert sorted(permute(np.arange(size), size, np.uint64(key)).tolist()) == list(range(size))


@given(COUNTS, st.integers(0, 9), st.lists(st.integers(0, 10_000), min_size=1, max_size=40))
@settings(deadline=None)
def test_a_position_does_not_depend_on_its_company(counts: list[int], seed: int, positions: list[int]):
    order = Order(counts, seed, block_rows=4, window_blocks=3)
    together = np.stack(order.locate(np.array(positions)), axis=1)
    alone = np.concatenate([np.stack(Order(counts, seed, block_rows=4, window_blocks=3).locate(np.array([p])), axis=1)
                            for p in positions])
    assert np.array_equal(together, alone)


def test_known_values():
    """A change of the order would make old runs unrepeatable: this must never change."""
    shards, rows = Order([5, 9, 1], 7, block_rows=2, window_blocks=3).locate(np.arange(20))
    assert shards.tolist() == KNOWN[0]
    assert rows.tolist() == KNOWN[1]
    assert [values.tolist() for values in Order([300_000] * 3, 1).locate(np.array([0, 1, 899_999, 10**12]))] == KNOWN[2]


KNOWN = ([0, 1, 0, 0, 1, 1, 1, 1, 1, 0, 1, 2, 0, 1, 1, 1, 1, 1, 2, 0],
         [2, 0, 3, 4, 2, 1, 3, 6, 4, 0, 5, 0, 1, 8, 7, 5, 6, 3, 0, 0],
         [[1, 1, 0, 2], [39897, 292107, 391, 51403]])


def test_seeds_and_epochs_differ():
    orders = [np.stack(Order([1000], seed).locate(np.arange(e * 1000, e * 1000 + 1000)))[1]
              for seed in (0, 1) for e in (0, 1)]
    for i in range(4):
        for j in range(i):
            assert (orders[i] == orders[j]).mean() < 0.02


def test_reads_stay_in_the_blocks_of_a_window():
    block, window, counts = 16, 8, [640] * 20
    order = Order(counts, 3, block_rows=block, window_blocks=window)
    for start in range(0, sum(counts), block * window):
        shards, rows = order.locate(np.arange(start, start + block * window))
        numbers = np.sort(shards * 640 + rows)
        runs = 1 + np.count_nonzero(np.diff(numbers) != 1)
        assert runs <= window + 1  # + 1: a block may lie across the end of the rotated numbering


@pytest.mark.parametrize("size", [2, 3, 5, 7, 8, 16, 33])
def test_every_place_is_equally_likely(size: int):
    """Chi-squared over where each row goes, for 20,000 keys; 6 standard deviations of its distribution."""
    keys = np.random.default_rng(0).integers(0, 1 << 64, 20_000, dtype=np.uint64)
    freedom = size - 1
    for value in range(size):
        places = permute(np.full(len(keys), value), size, keys)
        expected = len(keys) / size
        statistic = float(((np.bincount(places, minlength=size) - expected) ** 2 / expected).sum())
        assert statistic < freedom + 6 * np.sqrt(2 * freedom) + 6


def test_neighbours_are_torn_apart():
    rows = Order([1 << 16], 5).locate(np.arange(1 << 14))[1]
    correlation = np.corrcoef(rows[:-1], rows[1:])[0, 1]
    assert abs(correlation) < 0.05


def test_fifteen_trillion_tokens_cost_nothing():
    """100,000 shards, 3.7e9 rows of 4,096 tokens: memory is that of the shard list, time that of the batch."""
    counts = np.full(100_000, 36_622)
    counts[::7] += 13
    tracemalloc.start()
    order = Order(counts, 0)
    positions = np.random.default_rng(0).integers(0, 5 * order.total, 4096)
    began = time.perf_counter()
    shards, rows = order.locate(positions)
    seconds = time.perf_counter() - began
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16e6
    assert seconds < 20  # a few milliseconds; a loop over all positions takes hours
    assert np.all(rows < counts[shards])
    assert rows.min() >= 0


def test_what_makes_no_order():
    for counts in ([], [0, 0], [-1, 3]):
        with pytest.raises(ValueError, match="row"):
            Order(counts, 0)
    with pytest.raises(ValueError, match="block_rows"):
        Order([3], 0, block_rows=0)
    with pytest.raises(ValueError, match="from 0"):
        Order([3], 0).locate(np.array([-1]))


def test_ids_of_a_single_set(tmp_path):
    manifest = write_set(tmp_path)
    order = Order([shard.rows for shard in manifest.shards], 0)
    shards, rows = order.locate(np.arange(4, 24))
    assert Source.single(str(tmp_path), manifest, 0).ids(4, 20) == [
        f"{manifest.shards[s].name}:{r}" for s, r in zip(shards, rows)]
