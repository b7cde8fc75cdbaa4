"""Random elements of a gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from tidewheel.train.compression import At, Compression, Exchange, summed_bytes
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch


class RandomK(Compression):
    """Send random elements of each tensor, the same of all workers, which follow from the seed and the step.

    Of every 1 / density neighbours one is sent. Only values travel, and they are summed on the way.
    """

    VERSION = Version("compression_randomk", uses=(Compression.VERSION,))
    NOT_REPRODUCIBLE = ""

    density: float = Field(default=0.01, gt=0, le=1)
    """Share of the elements that are sent."""

    def sum(self, values: torch.Tensor, at: At) -> Exchange:
        from tidewheel.train.compressions.coding import sparse

        return sparse.random(values, self._kept(values.shape[1]), at)

    def _kept(self, elements: int) -> int:
        return math.ceil(self.density * elements)

    def sent_bytes(self, shape: Sequence[int], workers: int) -> float:
        return summed_bytes(self._kept(math.prod(shape)), workers)
