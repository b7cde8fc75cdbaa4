"""Which positions of the order the global batch of a step takes: the one function that everyone asks.

A step takes the next positions that no window passes over. Windows are stretches of the data that made a run roll back
(`train.guards.rollback`); the list of them is part of the run's record, so positions stay a pure function of
(batch configuration, windows, step) for the loop, the audit and the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tidewheel.train.batch_size import BatchSizes

Window = tuple[int, int]
"""Positions [start, end) that are passed over."""


class Positions:
    """Positions of every step's global batch; immutable.

    Args:
        sizes: sequences of every global batch.
        windows: what is passed over, in the order in which the run found it; disjoint.

    Raises:
        ValueError: windows that overlap, or are empty or negative.
    """

    def __init__(self, sizes: BatchSizes, windows: Iterable[Window] = ()) -> None:
        self.sizes = sizes
        self.windows = tuple((int(start), int(end)) for start, end in windows)
        bounds = np.array(sorted(self.windows), dtype=np.int64).reshape(-1, 2)
        starts, ends = bounds[:, 0], bounds[:, 1]
        if np.any(starts < 0) or np.any(ends <= starts) or np.any(starts[1:] < ends[:-1]):
            raise ValueError(f"windows must be disjoint and not empty, got {sorted(self.windows)}")
        self._shifts = np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int64)
        self._before = starts - self._shifts[:-1]  # sequences taken before each window

    def known(self, number: int) -> Positions:
        """The positions as they were when the run knew the first `number` windows."""
        return Positions(self.sizes, self.windows[:number])

    def passing_over(self, window: Window) -> Positions:
        """The same with one more window."""
        return Positions(self.sizes, (*self.windows, window))

    def count(self, step: int) -> int:
        """Sequences of the global batch of `step`, counted from 1."""
        return int(self._counts(np.array([step]))[0])

    def of(self, step: int) -> np.ndarray:
        """[count(step)] int64, rising: the positions of `step`."""
        return self.of_steps([step])

    def of_steps(self, steps: Sequence[int] | np.ndarray) -> np.ndarray:
        """[sum of counts] int64: the positions of `steps`, one step after the other."""
        steps = np.asarray(steps, dtype=np.int64)
        counts = self._counts(steps)
        firsts = np.repeat(self._taken(steps - 1) - np.cumsum(counts) + counts, counts)
        return self._place(firsts + np.arange(counts.sum(), dtype=np.int64))

    def steps(self, steps: Sequence[int] | np.ndarray) -> np.ndarray:
        """[sum of counts] int64: the step that each of `of_steps` belongs to."""
        steps = np.asarray(steps, dtype=np.int64)
        return np.repeat(steps, self._counts(steps))

    def end(self, step: int) -> int:
        """The position behind the last one of `step`; 0 for step 0."""
        return int(self.of(step)[-1]) + 1 if step else 0

    def skipped(self, end: int) -> np.ndarray:
        """[n] int64: positions below `end` that are passed over."""
        parts = [np.arange(start, min(stop, end), dtype=np.int64) for start, stop in sorted(self.windows)]
        return np.concatenate([*parts, np.empty(0, dtype=np.int64)])

    def _counts(self, steps: np.ndarray) -> np.ndarray:
        return self.sizes.counts(steps)

    def _taken(self, steps: np.ndarray) -> np.ndarray:
        """Sequences taken by steps 1 to each of `steps`."""
        return self.sizes.taken(steps)

    def _place(self, taken: np.ndarray) -> np.ndarray:
        """Position of the sequence before which `taken` others were taken."""
        return taken + self._shifts[np.searchsorted(self._before, taken, side="right")]
