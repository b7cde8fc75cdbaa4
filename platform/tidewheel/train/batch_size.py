"""Compute how many sequences each step reads: a fixed number, or fewer while the batch ramps up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tidewheel.train.batch_config import BatchConfig


class BatchSizes:
    """Sequences of each step's global batch. Steps count from 1.

    Args:
        batch: a `BatchConfig` as in run.json; `ramp` may be missing.
        sequence_length: tokens of a sequence.
    """

    def __init__(self, batch: Mapping[str, Any], sequence_length: int) -> None:
        firsts, taken, sizes = [1], [0], []
        for stage in batch.get("ramp", ()):
            sizes.append(int(stage["sequences"]))
            steps = -(-int(stage["tokens"]) // (sizes[-1] * sequence_length))
            firsts.append(firsts[-1] + steps)
            taken.append(taken[-1] + steps * sizes[-1])
        sizes.append(int(batch["global_sequences"]))
        self._firsts = np.array(firsts, dtype=np.int64)  # first step of each stage
        self._taken = np.array(taken, dtype=np.int64)  # sequences before each stage
        self._sizes = np.array(sizes, dtype=np.int64)

    @classmethod
    def of(cls, batch: BatchConfig, sequence_length: int) -> BatchSizes:
        """Return the batch sizes of a configured run."""
        return cls(batch.canonical(), sequence_length)

    @property
    def largest(self) -> int:
        """Sequences of the largest batch."""
        return int(self._sizes.max())

    def counts(self, steps: np.ndarray) -> np.ndarray:
        """Return the sequences of each of `steps`, int64 of the same shape."""
        return self._sizes[self._stages(steps)]

    def taken(self, steps: np.ndarray) -> np.ndarray:
        """Return the sequences of steps 1 to s together, for each s of `steps` (0 or more), int64 of the same shape."""
        stages = self._stages(steps)
        return self._taken[stages] + (steps - self._firsts[stages] + 1) * self._sizes[stages]

    def total(self, steps: int) -> int:
        """Return the sequences of the first `steps` steps."""
        return int(self.taken(np.array(steps)))

    def steps(self, sequences: int) -> int:
        """Return the number of whole steps that `sequences` suffice for: the inverse of `total`."""
        stage = int(np.searchsorted(self._taken, sequences, side="right")) - 1
        return int(self._firsts[stage] - 1 + (sequences - self._taken[stage]) // self._sizes[stage])

    def _stages(self, steps: np.ndarray) -> np.ndarray:
        return np.maximum(np.searchsorted(self._firsts, steps, side="right") - 1, 0)
