"""Compute the positions of each step's global batch in the planned order, for all code that needs them.

A step takes the next positions outside all windows. Windows are stretches of the data that the run passes over after
a rollback (`train.guards.policy.window`). The list of windows is part of the run's record, so positions are a pure
function of (batch configuration, windows, share, step) for the loop, the audit and the trace.

Groups of a DiLoCo run share each step: with G groups of B sequences, group g takes positions [g B, (g + 1) B) of what a
single run with a batch of G B sequences takes in that step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tidewheel.train.batch_size import BatchSizes

Window = tuple[int, int]
"""Positions [start, end) that the run passes over."""


class Positions:
    """Positions of every step's global batch; immutable.

    Args:
        sizes: sequences of every global batch.
        windows: disjoint windows, in the order in which the run added them.
        share: (group, groups), which part of each step is read.

    Raises:
        ValueError: windows overlap, or one is empty or negative; or there are windows and several groups.
    """

    def __init__(self, sizes: BatchSizes, windows: Iterable[Window] = (), share: tuple[int, int] = (0, 1)) -> None:
        self.sizes = sizes
        self.share = share
        self.windows = tuple((int(start), int(end)) for start, end in windows)
        bounds = np.array(sorted(self.windows), dtype=np.int64).reshape(-1, 2)
        starts, ends = bounds[:, 0], bounds[:, 1]
        if np.any(starts < 0) or np.any(ends <= starts) or np.any(starts[1:] < ends[:-1]):
            raise ValueError(f"windows must be disjoint and not empty, got {sorted(self.windows)}")
        if self.windows and share[1] > 1:
            raise ValueError("a group's windows would be in other groups' data: groups have none")
        self._shifts = np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int64)
        self._before = starts - self._shifts[:-1]  # sequences taken before each window

    def known(self, count: int) -> Positions:
        """Return the positions as they were when the run had only the first `count` windows."""
        return Positions(self.sizes, self.windows[:count], self.share)

    def passing_over(self, window: Window) -> Positions:
        """Return the positions with one more window."""
        return Positions(self.sizes, (*self.windows, window), self.share)

    def count(self, step: int) -> int:
        """Return the number of sequences in the global batch of `step`, counted from 1."""
        return int(self._counts(np.array([step]))[0])

    def of(self, step: int) -> np.ndarray:
        """Return the positions of `step`, [count(step)] int64, rising."""
        return self.of_steps([step])

    def of_steps(self, steps: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the positions of `steps`, one step after the other, [sum of counts] int64."""
        steps = np.asarray(steps, dtype=np.int64)
        counts = self._counts(steps)
        group, groups = self.share
        begins = groups * self._taken(steps - 1) + group * counts
        firsts = np.repeat(begins - np.cumsum(counts) + counts, counts)
        return self._at(firsts + np.arange(counts.sum(), dtype=np.int64))

    def steps(self, steps: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the step that each position of `of_steps(steps)` belongs to, [sum of counts] int64."""
        steps = np.asarray(steps, dtype=np.int64)
        return np.repeat(steps, self._counts(steps))

    def end(self, step: int) -> int:
        """Return the position behind the last one of `step`, 0 for step 0."""
        return int(self.of(step)[-1]) + 1 if step else 0

    def skipped(self, end: int) -> np.ndarray:
        """Return the positions below `end` that the run passes over, [n] int64."""
        parts = [np.arange(start, min(stop, end), dtype=np.int64) for start, stop in sorted(self.windows)]
        return np.concatenate([*parts, np.empty(0, dtype=np.int64)])

    def elsewhere(self, step: int) -> np.ndarray:
        """Return the positions below `end(step)` that other groups read, [n] int64."""
        if self.share[1] == 1:
            return np.empty(0, dtype=np.int64)
        return np.setdiff1d(np.arange(self.end(step), dtype=np.int64), self.of_steps(range(1, step + 1)))

    def _counts(self, steps: np.ndarray) -> np.ndarray:
        return self.sizes.counts(steps)

    def _taken(self, steps: np.ndarray) -> np.ndarray:
        """Return the number of sequences that steps 1 to s take together, for each s of `steps`."""
        return self.sizes.taken(steps)

    def _at(self, taken: np.ndarray) -> np.ndarray:
        """Return the position of the next sequence after `taken` sequences."""
        return taken + self._shifts[np.searchsorted(self._before, taken, side="right")]
