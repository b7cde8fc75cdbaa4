"""Assign the micro-batches of a step to data ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatchShare:
    """The micro-batches of a step that one data rank computes. They are numbered in the order of the global batch.

    With stride 1 a rank has consecutive micro-batches: of M on 2 ranks, rank 0 has 0 .. M/2 - 1 and rank 1 the rest.
    With stride n, which divides the size, n neighbouring ranks take turns: 0, 2, 4, ... and 1, 3, 5, ...
    """

    rank: int = 0
    size: int = 1
    stride: int = 1

    def of(self, total: int) -> range:
        """Return the indices of this rank's micro-batches in the order in which it computes them.

        Args:
            total: micro-batches of the step, a multiple of `size`.
        """
        group, offset = divmod(self.rank, self.stride)
        per_group = total // (self.size // self.stride)
        return range(group * per_group + offset, (group + 1) * per_group, self.stride)
