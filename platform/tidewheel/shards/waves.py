"""The order of a set that is read wave by wave: the row at a position does not depend on later waves.

A wave is a range of the set's shards. An epoch has the rows of the first wave, in the order that `shards.order` gives
to them alone, then those of the second, and so on; each epoch shuffles them anew. So training can begin when the first
wave is written, and reads the same rows as if all waves had been.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tidewheel.shards.order import Order, hash64

_WAVES = 0x57415645
"""Distinguishes the seeds of waves from those of a mixture's domains."""


class WaveOrder:
    """The order of a shard set's rows: its waves one after the other, each shuffled separately.

    Args:
        rows_per_shard: rows of each shard, in the manifest's order.
        waves: number of shards of each wave; a wave may be empty.
        seed: any integer; only its lowest 64 bits are used.
        whole: False while more waves are to come. Then only positions of the first epoch are known, as far as they go.
        sizes: `block_rows` and `window_blocks` of `Order`.
    """

    def __init__(self, rows_per_shard: Sequence[int], waves: Sequence[int], seed: int, *, whole: bool = True,
                 **sizes: Any) -> None:
        self._whole, self._seed, self._sizes = whole, seed, sizes
        self._rows = np.asarray(rows_per_shard, dtype=np.int64)
        self._first = np.concatenate((np.zeros(1, np.int64), np.cumsum(waves, dtype=np.int64)))  # shard of each wave
        ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(self._rows)))[self._first]
        self._ends = ends[1:]
        self._orders: dict[int, Order] = {}  # of the waves that were read: a run may have one for each step
        self.total = int(ends[-1])
        """Rows of one epoch; while more waves are to come, rows of the present ones."""

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (shard, row), int64 [B] each, of global positions; position p is in epoch p // total.

        Args:
            positions: int64 [B].

        Raises:
            ValueError: a position is negative, or in a wave that is still to come.
        """
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and positions.min() < 0:
            raise ValueError(f"positions count from 0, got {positions.min()}")
        if not self._whole and positions.size and positions.max() >= self.total:
            raise ValueError(f"the waves so far end at position {self.total}, got {positions.max()}")
        epochs, inside = np.divmod(positions, max(self.total, 1))
        waves = np.searchsorted(self._ends, inside, side="right")
        shards, rows = np.empty_like(positions), np.empty_like(positions)
        for wave in np.unique(waves).tolist():  # one or two in a batch
            in_wave, order = waves == wave, self._order(wave)
            start = int(self._ends[wave]) - order.total
            shards[in_wave], rows[in_wave] = order.locate(epochs[in_wave] * order.total + inside[in_wave] - start)
            shards[in_wave] += self._first[wave]
        return shards, rows

    def _order(self, wave: int) -> Order:
        if wave not in self._orders:
            rows = self._rows[self._first[wave]:self._first[wave + 1]].tolist()
            self._orders[wave] = Order(rows, hash64(self._seed ^ hash64(wave ^ _WAVES)), **self._sizes)
        return self._orders[wave]
