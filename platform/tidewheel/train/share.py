"""Which micro-batches of a step a data rank computes, and in which order. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """A data rank's part of the micro-batches of a step, which are numbered in the order of the global batch.

    With a stride of 1 a rank has neighbouring ones: of M on 2 ranks 0 .. M/2 - 1 and M/2 .. M - 1. With a stride of n,
    which divides the size, n ranks side by side go through theirs together: 0, 2, 4, ... and 1, 3, 5, ...
    """

    rank: int = 0
    size: int = 1
    stride: int = 1

    def of(self, total: int) -> range:
        """The numbers of this rank's micro-batches out of `total`, a multiple of `size`, in the order of their
        computation."""
        group, place = divmod(self.rank, self.stride)
        each = total // (self.size // self.stride)
        return range(group * each + place, (group + 1) * each, self.stride)
