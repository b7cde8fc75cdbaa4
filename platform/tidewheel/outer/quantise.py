"""Number types in which outer gradients are sent: pure functions of the values, whatever shards them by rows.

Blocks of a row share a scale. Rows are whole on every rank, because data parallelism shards the first dimension, so a
value has the same bits in every layout. Vectors would have their blocks cut, and are small: they are sent in bf16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

BLOCK = {"int8": 128, "int4": 64}
"""Values of a row that share a scale."""
MOST = {"int8": 127, "int4": 7}
"""Largest integer."""
VALUES, SCALES = "values", "scales"


def encode(gradient: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    """Return the tensors to send for rows of an outer gradient, each sharded by rows like the gradient.

    A scale is the largest magnitude of its block over the largest integer, rounded to bf16. Values are rounded to the
    nearest multiple of it; the largest may be cut by the scale's own rounding, at most 0.4 %.

    Args:
        gradient: fp32 [..., d] of finite values.
        kind: fp32, bf16, int8 or int4.

    Returns:
        {"values": fp32 or bf16 [..., d]}; or {"values": int8 [..., d], "scales": bf16 [..., blocks]}, of int4 "values"
        are uint8 [..., d / 2 rounded up], with the earlier value in the low half.
    """
    if kind == "fp32":
        return {VALUES: gradient}
    if kind == "bf16" or gradient.ndim < 2:
        return {VALUES: gradient.bfloat16()}
    width, block, most = gradient.shape[-1], BLOCK[kind], MOST[kind]
    blocks = F.pad(gradient, (0, -width % block)).unflatten(-1, (-1, block))
    scales = (blocks.abs().amax(dim=-1) / most).bfloat16()
    divisor = torch.where(scales == 0, 1.0, scales.float())
    whole = (blocks / divisor[..., None]).round_().clamp_(-most, most).to(torch.int8).flatten(-2)[..., :width]
    if kind == "int8":
        return {VALUES: whole.contiguous(), SCALES: scales}
    halves = (F.pad(whole, (0, width % 2)) & 15).view(torch.uint8)
    return {VALUES: halves[..., ::2] | (halves[..., 1::2] << 4), SCALES: scales}


def decode(tensors: dict[str, torch.Tensor], kind: str, width: int) -> torch.Tensor:
    """Return the fp32 rows that `encode` has rounded.

    Args:
        tensors: as `encode` returns them.
        kind: of `encode`.
        width: last dimension of the gradient.
    """
    values = tensors[VALUES]
    if SCALES not in tensors:
        return values.float()
    if kind == "int4":
        low, high = values & 15, values >> 4
        halves = torch.stack((low, high), dim=-1).flatten(-2)[..., :width].to(torch.int8)
        values = torch.where(halves > MOST[kind], halves - 16, halves)
    block = BLOCK[kind]
    blocks = F.pad(values.float(), (0, -width % block)).unflatten(-1, (-1, block))
    return (blocks * tensors[SCALES].float()[..., None]).flatten(-2)[..., :width].contiguous()
