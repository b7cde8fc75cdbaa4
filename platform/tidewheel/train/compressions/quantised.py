"""Gradients in 8 or 4 bits, rounded at random."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tidewheel.train.compression import At, Compression, Exchange
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch


class Quantised(Compression):
    """Send integers and one fp32 scale for each block (QSGD, https://arxiv.org/abs/1610.02132).

    Rounding up or down is random with the mean of the exact value, and a function of the seed, the step, the slot and
    the element. Each worker adds up a piece, rounds the sum and sends it to all others.
    """

    VERSION = Version("compression_quantised", uses=(Compression.VERSION,))
    NOT_REPRODUCIBLE = ""

    bits: Literal[8, 4] = 8
    """Bits of an element."""
    block: int = Field(default=256, ge=8)
    """Elements that share a scale, the largest absolute value among them."""

    def sum(self, values: torch.Tensor, at: At) -> Exchange:
        from tidewheel.train.compressions.coding import blocks

        return blocks.summed(values, at, blocks.Rounded(self.bits, self.block))

    def sent_bytes(self, shape: Sequence[int], workers: int) -> float:
        return 2 * (workers - 1) * coded_bytes(math.prod(shape), workers, self.bits, self.block)


def coded_bytes(elements: int, slots: int, bits: int, block: int) -> float:
    """Return the bytes of a slot's piece: codes and scales.

    Args:
        elements: of the tensor.
        slots: number of pieces.
        bits: of an element.
        block: elements that share a scale.
    """
    piece = math.ceil(elements / slots / 8) * 8
    return piece * bits / 8 + 4 * math.ceil(piece / block)
