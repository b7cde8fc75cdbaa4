"""Gradients of low rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from tidewheel.train.compression import At, Compression, Exchange, summed_bytes
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch


class PowerSGD(Compression):
    """Send a product of two thin matrices in the place of each matrix (https://arxiv.org/abs/1905.13727).

    One step of power iteration begins with the last step's factor. The factors are summed on the way, so what a worker
    sends does not grow with the number of workers.
    """

    VERSION = Version("compression_power_sgd", uses=(Compression.VERSION,))
    NOT_REPRODUCIBLE = ""

    rank: int = Field(default=4, ge=1)
    """Columns of the two matrices."""

    def fits(self, shape: Sequence[int]) -> bool:
        rows, columns = _matrix(shape)
        return len(shape) > 1 and 2 * (rows + columns) * self.rank <= rows * columns

    def state(self, name: str, shape: Sequence[int], seed: int) -> dict[str, torch.Tensor]:
        from tidewheel.train.compressions.coding import low_rank

        return {"factor": low_rank.start(name, _matrix(shape)[1], self.rank, seed)}

    def sum(self, values: torch.Tensor, at: At) -> Exchange:
        from tidewheel.train.compressions.coding import low_rank

        return low_rank.summed(values, at, *_matrix(at.shape))

    def sent_bytes(self, shape: Sequence[int], workers: int) -> float:
        return summed_bytes(sum(_matrix(shape)) * self.rank, workers)


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a tensor as a matrix: its first dimension, and all others."""
    return shape[0], math.prod(shape[1:])
