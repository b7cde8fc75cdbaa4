"""Whole numbers that are appended to while other threads read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FIRST = 64
"""Room of a new array."""


class Appended:
    """An int64 array that grows at its end, at a cost of O(1) for each value.

    Args:
        values: the first ones.
    """

    def __init__(self, values: Sequence[int] | np.ndarray = ()) -> None:
        self.values = np.empty(0, dtype=np.int64)
        """The values so far. It is replaced and never written to, so a reader that holds it sees no change."""
        self._room = np.empty(FIRST, dtype=np.int64)
        self.extend(values)

    def extend(self, values: Sequence[int] | np.ndarray) -> None:
        """Append values."""
        size = len(self.values)
        end = size + len(values)
        if end > len(self._room):
            room = np.empty(2 * end, dtype=np.int64)
            room[:size] = self.values
            self._room = room
        self._room[size:end] = values
        self.values = self._room[:end]
