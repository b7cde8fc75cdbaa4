"""The signs of a gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from tidewheel.train.compression import At, Compression, Exchange
from tidewheel.train.compressions.quantised import coded_bytes
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch


class OneBit(Compression):
    """Send the sign of each element and the mean absolute value of each block (https://arxiv.org/abs/1901.09847).

    Both ways are compressed, from the workers to the one that adds up a piece and back, with error feedback on both
    (https://arxiv.org/abs/2102.02888). Unlike 1-bit Adam, the optimizer sees the sum as its gradient, and goes on to
    update its second moment from it.
    """

    VERSION = Version("compression_one_bit", uses=(Compression.VERSION,))
    NOT_REPRODUCIBLE = ""

    block: int = Field(default=256, ge=8)
    """Elements that share a size."""

    def sum(self, values: torch.Tensor, at: At) -> Exchange:
        from tidewheel.train.compressions.coding import blocks

        return blocks.summed(values, at, blocks.Signs(self.block))

    def sent_bytes(self, shape: Sequence[int], workers: int) -> float:
        return 2 * (workers - 1) * coded_bytes(math.prod(shape), workers, 1, self.block)
