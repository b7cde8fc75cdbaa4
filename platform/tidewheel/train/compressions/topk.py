"""The largest elements of a gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from tidewheel.train.compression import At, Compression, Exchange
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch


class TopK(Compression):
    """Send the elements of each tensor that are largest in absolute value (https://arxiv.org/abs/1809.07599).

    An element takes 8 bytes: its index and its value. Every worker gets those of all others, so what it sends grows
    with the number of workers.
    """

    VERSION = Version("compression_topk", uses=(Compression.VERSION,))
    NOT_REPRODUCIBLE = ""

    density: float = Field(default=0.01, gt=0, le=1)
    """Share of the elements that are sent."""

    def sum(self, values: torch.Tensor, at: At) -> Exchange:
        from tidewheel.train.compressions.coding import sparse

        return sparse.largest(values, self._kept(values.shape[1]))

    def _kept(self, elements: int) -> int:
        return math.ceil(self.density * elements)

    def sent_bytes(self, shape: Sequence[int], workers: int) -> float:
        return 8.0 * self._kept(math.prod(shape)) * (workers - 1)
