"""Assign the micro-batches of a step to data ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatchShare:
    """The micro-batches of a step that one data rank computes. They are numbered in the order of the global batch.

    With stride 1 a rank has consecutive micro-batches: of M on 2 ranks, rank 0 has 0 .. M/2 - 1 and rank 1 the rest.
    With stride n, which divides the size, n neighbouring ranks take turns: 0, 2, 4, ... and 1, 3, 5, ...

    With `virtual_ranks`, rank r has the micro-batches of that many virtual ranks, behind those of the ranks before it.
    """

    rank: int = 0
    size: int = 1
    stride: int = 1
    virtual_ranks: tuple[int, ...] = ()
    """Of each data rank, at least one; (): all have as many."""

    def of(self, total: int) -> range:
        """Return the indices of this rank's micro-batches in the order in which it computes them.

        Args:
            total: micro-batches of the step, a multiple of the number of virtual ranks.
        """
        if self.virtual_ranks:
            parts = total // sum(self.virtual_ranks)
            first = sum(self.virtual_ranks[:self.rank])
            return range(first * parts, (first + self.virtual_ranks[self.rank]) * parts)
        group, offset = divmod(self.rank, self.stride)
        per_group = total // (self.size // self.stride)
        return range(group * per_group + offset, (group + 1) * per_group, self.stride)

    def total(self, own: int) -> int:
        """Return the number of micro-batches of a step.

        Args:
            own: those of this rank.
        """
        if self.virtual_ranks:
            return own // self.virtual_ranks[self.rank] * sum(self.virtual_ranks)
        return own * self.size
