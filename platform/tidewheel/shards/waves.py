"""The order of a set that is read wave by wave: the row at a position does not depend on later waves.

A wave is a range of the set's shards. An epoch has the rows of the first wave, in the order that `shards.order` gives
to them alone, then those of the second, and so on; each epoch shuffles them anew. So training can begin when the first
wave is written, and reads the same rows as if all waves had been. A wave may be read in several passes before the next
one; each pass shuffles it anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tidewheel.shards.appended import Appended
from tidewheel.shards.order import Order, hash64

_WAVES = 0x57415645
"""Distinguishes the seeds of waves from those of a mixture's domains."""
_ORDERS = 64
"""Orders of waves that are kept at most: a batch reads one wave or two, and a run may have one for each step."""


@dataclass(frozen=True)
class Passes:
    """How each wave is read."""

    count: int = 1
    """Passes over a wave before the next wave."""
    group: int = 1
    """Neighbouring rows of a shard that stay together, in their order; they divide the rows of each shard."""


ONCE = Passes()


class WaveOrder:
    """The order of a shard set's rows: its waves one after the other, each shuffled separately.

    Args:
        rows_per_shard: rows of each shard, in the manifest's order.
        waves: number of shards of each wave; a wave may be empty.
        seed: any integer; only its lowest 64 bits are used.
        whole: False while more waves are to come. Then only positions of the first epoch are known, as far as they go.
        passes: how each wave is read.
        sizes: `block_rows` and `window_blocks` of `Order`.
    """

    def __init__(self, rows_per_shard: Sequence[int], waves: Sequence[int], seed: int, *, whole: bool = True,
                 passes: Passes = ONCE, **sizes: Any) -> None:
        self._seed, self._passes, self._sizes = seed, passes, sizes
        self._rows, self._first, self._ends = Appended(), Appended([0]), Appended([0])
        self._orders: dict[int, Order] = {}
        self._reach = (0, False)  # positions of an epoch, and whether all waves are there
        self.grow(rows_per_shard, waves, whole=whole)

    def grow(self, rows_per_shard: Sequence[int], waves: Sequence[int], *, whole: bool) -> None:
        """Add waves behind those that are there, whose positions stay the same for threads that read them.

        Args:
            rows_per_shard: rows of each shard of the new waves.
            waves: number of shards of each new wave.
            whole: see `WaveOrder`.
        """
        rows = np.asarray(rows_per_shard, dtype=np.int64)
        behind = np.cumsum(waves, dtype=np.int64)
        taken = np.concatenate((np.zeros(1, np.int64), np.cumsum(rows)))[behind]
        self._rows.extend(rows)
        self._first.extend(self._first.values[-1] + behind)
        self._ends.extend(self._ends.values[-1] + self._passes.count * taken)
        self._reach = (int(self._ends.values[-1]), whole)

    @property
    def total(self) -> int:
        """Positions of one epoch; while more waves are to come, of the present ones."""
        return self._reach[0]

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (shard, row), int64 [B] each, of global positions; position p is in epoch p // total.

        Args:
            positions: int64 [B].

        Raises:
            ValueError: a position is negative, or in a wave that is still to come.
        """
        positions, epochs, inside, waves = self._divided(positions)
        group = self._passes.group
        shards, rows = np.empty_like(positions), np.empty_like(positions)
        for wave in np.unique(waves).tolist():  # one or two in a batch
            in_wave, order = waves == wave, self._order(wave)
            start = int(self._ends.values[wave])
            place = epochs[in_wave] * self._passes.count * group * order.total + inside[in_wave] - start
            groups, samples = np.divmod(place, group)
            shards[in_wave], first = order.locate(groups)
            rows[in_wave] = first * group + samples
            shards[in_wave] += self._first.values[wave]
        return shards, rows

    def passes(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the wave of each position and its pass over this wave, int64 [B] each; both count from 0.

        In the second epoch of the set, passes count on.

        Args:
            positions: see `locate`.

        Raises:
            ValueError: see `locate`.
        """
        _, epochs, inside, waves = self._divided(positions)
        ends = self._ends.values
        rows = (ends[waves + 1] - ends[waves]) // self._passes.count
        return waves, epochs * self._passes.count + (inside - ends[waves]) // rows

    def complete_rows(self, end: int, number: int) -> int:
        """Return how many rows, from the first of the set on, have all been read in a pass.

        Args:
            end: position behind those that were read.
            number: of the pass over each wave, from 0.
        """
        epoch, inside = divmod(number, self._passes.count)
        ends = self._ends.values
        rows = np.diff(ends) // self._passes.count
        complete = epoch * self.total + ends[:-1] + (inside + 1) * rows <= end
        return int(rows[complete].sum())

    def _divided(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return positions as int64, the epoch of each, its position in this epoch, and its wave."""
        positions = np.asarray(positions, dtype=np.int64)
        total, whole = self._reach
        if positions.size and positions.min() < 0:
            raise ValueError(f"positions count from 0, got {positions.min()}")
        if not whole and positions.size and positions.max() >= total:
            raise ValueError(f"the waves so far end at position {total}, got {positions.max()}")
        epochs, inside = np.divmod(positions, max(total, 1))
        return positions, epochs, inside, np.searchsorted(self._ends.values[1:], inside, side="right")

    def _order(self, wave: int) -> Order:
        order = self._orders.get(wave)
        if order is None:
            first = self._first.values
            rows = self._rows.values[first[wave]:first[wave + 1]] // self._passes.group
            order = Order(rows.tolist(), hash64(self._seed ^ hash64(wave ^ _WAVES)), **self._sizes)
            if len(self._orders) >= _ORDERS:
                self._orders = {}  # another thread may still use the old one
            self._orders[wave] = order
        return order
