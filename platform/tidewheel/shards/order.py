"""The order in which sequences are read: a keyed permutation, computed for a position in constant time and memory.

The sequence at global position p is a pure function of (rows of each shard, seed, p): nothing is shuffled ahead or
remembered, and the whole state of the data iterator is p. Two levels keep reads local: blocks of consecutive rows are
permuted over the whole set, then rows are permuted inside windows of a few blocks. Each epoch has its own
permutations, and its blocks are cut at its own offset, so that the ragged last block is another one each time.

The permutation of {0..n-1} is a Feistel network (Luby and Rackoff 1988, "How to construct pseudorandom permutations
from pseudorandom functions") over the smallest even number of bits that holds n, walked along its cycle until it lands
below n (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). Round functions are the SplitMix64
finaliser (Steele, Lea and Flood 2014).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tidewheel.shards.manifest import Manifest

ROUNDS = 6
_U64 = np.uint64
_GOLDEN = _U64(0x9E3779B97F4A7C15)
_ROUND_KEYS = tuple(_U64(0x9E3779B97F4A7C15 * (number + 1) & 0xFFFFFFFFFFFFFFFF) for number in range(ROUNDS))


def mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser, elementwise on uint64: a bijection that scatters all bits."""
    values = (values ^ (values >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U64(27))) * _U64(0x94D049BB133111EB)
    return values ^ (values >> _U64(31))


def key(seed: int, *parts: np.ndarray | int) -> np.ndarray:
    """A 64-bit key for every element of the broadcast `parts`."""
    value = mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) + _GOLDEN)
    for part in parts:
        value = mix(value * _GOLDEN + np.atleast_1d(np.asarray(part)).astype(np.uint64) + _GOLDEN)
    return value


def permute(index: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Image of each `index` (int64, 0 <= index < size) under the permutation of {0..size-1} its key chooses."""
    if size <= 1:
        return index
    half = _U64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = _U64((1 << int(half)) - 1)
    keys = np.broadcast_to(keys, index.shape)
    result = _feistel(index.astype(np.uint64), keys, half, mask)
    outside = np.flatnonzero(result >= _U64(size))
    while outside.size:  # at most 3 of 4 values lie outside, so the number left falls geometrically
        result[outside] = _feistel(result[outside], keys[outside], half, mask)
        outside = outside[result[outside] >= _U64(size)]
    return result.astype(np.int64)


def _feistel(values: np.ndarray, keys: np.ndarray, half: np.uint64, mask: np.uint64) -> np.ndarray:
    left, right = values >> half, values & mask
    for round_key in _ROUND_KEYS:
        left, right = right, left ^ (mix(right + keys + round_key) & mask)
    return (left << half) | right


class Order:
    """Positions of any epoch to (shard, row).

    Args:
        rows_per_shard: rows of each shard, in the manifest's order. Memory is O(number of shards).
        seed: chooses the permutations.
        block_rows: consecutive rows that stay together over the set.
        window_blocks: blocks whose rows are mixed with each other.
    """

    def __init__(self, rows_per_shard: Sequence[int], seed: int, *, block_rows: int = 256,
                 window_blocks: int = 64) -> None:
        if block_rows < 1 or window_blocks < 1:
            raise ValueError(f"block_rows {block_rows} and window_blocks {window_blocks} must be positive")
        self.starts = np.concatenate([[0], np.cumsum(np.asarray(rows_per_shard, dtype=np.int64))]).astype(np.int64)
        self.total = int(self.starts[-1])
        if self.total < 1:
            raise ValueError("an order needs at least one row")
        self.seed, self.block_rows, self.window_rows = seed, block_rows, block_rows * window_blocks

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Shard index and row inside the shard, int64, for int64 global positions; epoch = position // total."""
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and positions.min() < 0:
            raise ValueError("positions count from 0")
        epochs, within = np.divmod(positions, self.total)
        slots = self._mix_windows(within, epochs)
        rows = self._mix_blocks(slots, epochs)
        shards = np.searchsorted(self.starts, rows, side="right") - 1
        return shards, rows - self.starts[shards]

    def _mix_windows(self, within: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """Permute positions inside their window; the last window of an epoch may be shorter."""
        windows, offsets = np.divmod(within, self.window_rows)
        keys = key(self.seed, 1, epochs, windows)
        last, rest = divmod(self.total, self.window_rows)
        result = np.empty_like(within)
        short = windows == last
        result[~short] = permute(offsets[~short], self.window_rows, keys[~short])
        result[short] = permute(offsets[short], rest, keys[short])
        return windows * self.window_rows + result

    def _mix_blocks(self, slots: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """Permute whole blocks over the set; the ragged rest keeps its slots, at an offset that the epoch chooses."""
        whole = self.total // self.block_rows
        blocks, offsets = np.divmod(slots, self.block_rows)
        full = blocks < whole
        moved = blocks.copy()
        moved[full] = permute(blocks[full], whole, key(self.seed, 2, epochs[full]))
        turn = (key(self.seed, 3, epochs) % _U64(self.total)).astype(np.int64)
        return (moved * self.block_rows + offsets + turn) % self.total


def batch_ids(order: Order, manifest: Manifest, start: int, count: int) -> list[str]:
    """Sequence ids ("shard name:row") of positions [start, start + count), without reading a shard."""
    shards, rows = order.locate(np.arange(start, start + count, dtype=np.int64))
    return [f"{manifest.shards[shard].name}:{row}" for shard, row in zip(shards.tolist(), rows.tolist())]
