"""Sums of gradients whose elements have few bits, with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from tidewheel.train.compression import At, Exchange, Gather, Swap
from tidewheel.train.compressions.coding.counter import uniform


class Code(Protocol):
    """Few bits for each element."""

    def encode(self, values: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes, uint8 or int8 [rows, c * bits / 8], and scales, fp32 [rows, blocks].

        Args:
            values: fp32 [rows, c], c a multiple of 8.
            draws: random numbers.
        """

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, count: int) -> torch.Tensor:
        """Return the values of codes, fp32 [..., count].

        Args:
            codes: [..., c * bits / 8].
            scales: [..., blocks].
            count: c.
        """


@dataclass(frozen=True)
class Draws:
    """Random numbers for the rows of a tensor."""

    at: At
    what: str
    slots: range

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return a number in [0, 1) for each element of fp32 [rows, c]."""
        per_slot = values.numel() // len(self.slots)
        return uniform(self.at, self.what, self.slots, per_slot, values.device).view(values.shape)


@dataclass(frozen=True)
class Rounded(Code):
    """Integers of `bits` bits, rounded at random between the two nearest."""

    bits: int
    block: int

    @property
    def most(self) -> int:
        """Return the largest code."""
        return (1 << self.bits - 1) - 1

    def encode(self, values: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        scales = _of_blocks(values.abs(), self.block).amax(dim=-1)
        wide = _wide(scales, values.shape[1], self.block)
        steps = torch.where(wide > 0, values / wide, 0.0) * self.most
        codes = (steps + draws.of(values)).floor_().clamp_(-self.most, self.most).nan_to_num_().to(torch.int8)
        if self.bits == 4:
            pairs = (codes + 8).view(len(codes), -1, 2).to(torch.uint8)
            codes = pairs[..., 0] | pairs[..., 1] << 4
        return codes, scales  # a block that is not finite has such a scale

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, count: int) -> torch.Tensor:
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).to(torch.int8) - 8
        return codes.float() * (_wide(scales, count, self.block) / self.most)


@dataclass(frozen=True)
class Signs(Code):
    """Signs, times the mean absolute value of the block."""

    block: int

    def encode(self, values: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = _of_blocks(values.abs(), self.block)
        sizes = torch.full(blocks.shape[-2:-1], self.block, device=values.device)
        sizes[-1] -= blocks.shape[-2] * self.block - values.shape[1]  # the last block may be shorter
        bits = (values >= 0).view(len(values), -1, 8).to(torch.uint8)
        weights = 1 << torch.arange(8, device=values.device, dtype=torch.uint8)
        return (bits * weights).sum(dim=-1, dtype=torch.uint8), blocks.sum(dim=-1) / sizes

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, count: int) -> torch.Tensor:
        bits = codes[..., None] >> torch.arange(8, device=codes.device, dtype=torch.uint8) & 1
        return (bits.flatten(-2).float() * 2 - 1) * _wide(scales, count, self.block)


def summed(values: torch.Tensor, at: At, code: Code) -> Exchange:
    """Sum the gradients of all slots: each slot adds up a piece of all of them, and sends the sum, both coded.

    What the sum loses stays with the slot that added it up. See `Compression.sum`.

    Args:
        values: of the own slots.
        at: which gradient, and when.
        code: of the elements.
    """
    (own, count), slots = values.shape, at.all_slots
    piece = -(-count // (8 * slots)) * 8  # bits fill whole bytes
    padded = F.pad(values, (0, slots * piece - count)).view(own * slots, piece)
    codes, scales = code.encode(padded, Draws(at, "gradients", at.slots))
    left = padded - code.decode(codes, scales, piece)
    codes, scales = yield Swap(codes.view(own, slots, -1), scales.view(own, slots, -1))
    total = values.new_zeros(own, piece)
    for row, scale in zip(codes.unbind(), scales.unbind()):  # in the order of the slots
        total += code.decode(row, scale, piece)
    codes, scales = code.encode(total, Draws(at, "sums", at.slots))
    lost = total - code.decode(codes, scales, piece)
    left = left.view(own, slots, piece)
    for row, slot in enumerate(at.slots):
        left[row, slot] += lost[row]
    values.copy_(left.view(own, -1)[:, :count])
    codes, scales = yield Gather(codes, scales)
    return code.decode(codes, scales, piece).flatten()[:count]


def _of_blocks(values: torch.Tensor, block: int) -> torch.Tensor:
    """Return [rows, blocks, block] of [rows, c], filled up with zeros."""
    return F.pad(values, (0, -values.shape[-1] % block)).unflatten(-1, (-1, block))


def _wide(scales: torch.Tensor, count: int, block: int) -> torch.Tensor:
    """Return the scale of each element, [..., count]."""
    return scales.repeat_interleave(block, dim=-1)[..., :count]
