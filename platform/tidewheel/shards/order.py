"""The order of rows: a keyed permutation, so that the position is the reader's whole state.

Rows are numbered across all shards of a set. An epoch (1) rotates this numbering by a keyed amount and divides it into
blocks of `block_rows` neighbours; (2) permutes the blocks across the whole set; (3) permutes the rows inside each
window of `window_blocks` permuted blocks. So reads stay within a window's blocks, and every epoch has another order.
The last block may be short. It stays last, and the rotation puts other rows into it in each epoch.

The permutation of [0, n) is a Feistel network over the next power of two with cycle walking: a value outside is
encrypted again (J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, methods 2 and 3). The
domain is below 2n, so fewer than 2 rounds of walking are expected. Nothing is stored but the shards' row counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ROUNDS = 24
"""As in VariPhilox (Mitchell et al., "Bandwidth-Optimal Random Shuffling for GPUs", 2021). Large domains need 4 rounds
(Luby and Rackoff, 1988). Domains of 5 to 8 rows showed a bias over 200,000 keys at 12 rounds, and none at 24."""
_MASK = (1 << 64) - 1
_ROTATE, _BLOCKS, _WINDOWS = 1, 2, 3  # separate the keys of the three steps


class Order:
    """The order of a shard set's rows, which depends only on (rows_per_shard, seed) and is reshuffled in every epoch.

    Args:
        rows_per_shard: rows of each shard, in the manifest's order.
        seed: any integer; only its lowest 64 bits are used.
        block_rows: neighbouring rows that stay together in the shuffle across the set.
        window_blocks: blocks whose rows are shuffled together. A reader should be able to hold a window: 16,384 rows
            by default, 128 MiB at 4,096 tokens of uint16.

    Raises:
        ValueError: no rows, or a size below 1.
    """

    def __init__(self, rows_per_shard: Sequence[int], seed: int, *, block_rows: int = 256,
                 window_blocks: int = 64) -> None:
        counts = np.asarray(rows_per_shard, dtype=np.int64)
        if counts.ndim != 1 or counts.sum() < 1 or counts.min() < 0:
            raise ValueError("an order needs a list of row counts with at least one row")
        if block_rows < 1 or window_blocks < 1:
            raise ValueError(f"block_rows and window_blocks are at least 1, got {block_rows} and {window_blocks}")
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        self._seed = seed & _MASK
        self._block, self._window = block_rows, block_rows * window_blocks
        self.total = int(self._ends[-1])
        """Rows of one epoch."""

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (shard, row), int64 [B] each, of global positions; position p is in epoch p // total.

        Args:
            positions: int64 [B].

        Raises:
            ValueError: a position is negative.
        """
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and positions.min() < 0:
            raise ValueError(f"positions count from 0, got {positions.min()}")
        epochs, inside = np.divmod(positions, self.total)
        rows = np.empty_like(positions)
        for epoch in np.unique(epochs):  # one or two in a batch
            in_epoch = epochs == epoch
            rows[in_epoch] = self._rows(int(epoch), inside[in_epoch])
        shards = np.searchsorted(self._ends, rows, side="right")
        return shards, rows - self._starts[shards]

    def passes(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the wave of each position, 0, and its pass over the set, int64 [B] each; both count from 0.

        Args:
            positions: int64 [B].
        """
        return np.zeros_like(positions), positions // self.total

    def complete_rows(self, end: int, number: int) -> int:
        """Return how many rows, from the first of the set on, have all been read in a pass.

        Args:
            end: position behind those that were read.
            number: of the pass, from 0.
        """
        return self.total if (number + 1) * self.total <= end else 0

    def _rows(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the row numbers in the whole set of `positions` in one epoch."""
        key = hash64(self._seed ^ hash64(epoch))
        shuffled = self._inside_windows(key, positions)
        slots, offsets = np.divmod(shuffled, self._block)
        whole = self.total // self._block  # the short block after them stays last
        movable = slots < whole
        slots[movable] = permute(slots[movable], whole, np.uint64(hash64(key ^ _BLOCKS)))
        rotation = hash64(key ^ _ROTATE) % self.total
        return (slots * self._block + offsets + rotation) % self.total

    def _inside_windows(self, key: int, positions: np.ndarray) -> np.ndarray:
        windows, inside = np.divmod(positions, self._window)
        keys = hash64_array(windows.astype(np.uint64) ^ np.uint64(hash64(key ^ _WINDOWS)))
        last = self.total // self._window  # index of the window that may be short
        short = windows == last
        inside[~short] = permute(inside[~short], self._window, keys[~short])
        inside[short] = permute(inside[short], self.total - last * self._window, keys[short])
        return windows * self._window + inside


def permute(values: np.ndarray, size: int, keys: np.ndarray | np.uint64) -> np.ndarray:
    """Apply the bijection of [0, size) that each key selects.

    Args:
        values: [B] int64 in [0, size).
        size: n, at most 2^62.
        keys: uint64, one for all or [B].

    Returns:
        [B] int64 in [0, size).
    """
    if size <= 1:
        return values.copy()
    bits = max(2, (size - 1).bit_length())
    result = values.astype(np.uint64)
    keys = np.broadcast_to(np.asarray(keys, dtype=np.uint64), result.shape)
    outside = np.arange(len(result))
    while len(outside):
        walked = _feistel(result[outside], bits, keys[outside])
        result[outside] = walked
        outside = outside[walked >= size]
    return result.astype(np.int64)


def _feistel(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """Encrypt `bits`-bit values. The halves may differ by one bit, so they swap sizes in each round."""
    low = bits // 2
    high = bits - low
    left, right = values >> np.uint64(low), values & np.uint64((1 << low) - 1)
    for round_index in range(ROUNDS):
        # `left` has `high` bits: it is combined with a hash of `right`, then the halves and their sizes swap
        noise = hash64_array(right + keys + np.uint64(round_index * _GOLDEN & _MASK))
        left, right = right, left ^ (noise >> np.uint64(64 - high))
        low, high = high, low
    return (left << np.uint64(low)) | right


_GOLDEN = 0x9E3779B97F4A7C15


def hash64(value: int) -> int:
    """Return the `hash64_array` of one integer."""
    return int(hash64_array(np.array([value & _MASK], dtype=np.uint64))[0])


def hash64_array(values: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of each value: SplitMix64's step and output function (Steele, Lea and Flood, OOPSLA 2014).

    Args:
        values: uint64, any shape.
    """
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
