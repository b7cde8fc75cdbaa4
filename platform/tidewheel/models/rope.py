"""Rotary position embedding (https://arxiv.org/abs/2104.09864), with Llama 3.1's scaling for long sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tidewheel.models.config import Rope, RopeScaling


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines of a batch, fp32 [B, 1, L, E / 2], computed once and shared by all layers of one `Rope`.

    It is not a pytree: FSDP's mixed precision casts the tensors among a block's inputs, and must leave these in fp32.
    """

    cos: torch.Tensor
    sin: torch.Tensor


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None, *,
                device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the angle per position of each pair, fp32 [head_dim / 2]: theta ** (-2 i / head_dim).

    With `scaling`, the angle of a pair depends on its turns in the original length, as in Llama 3.1's reference code.
    Fewer than `low_frequency_factor` turns: divided by `factor`. More than `high_frequency_factor`: unchanged. Between:
    interpolated linearly by the number of turns.

    Args:
        head_dim: width of a head.
        theta: base of the frequencies.
        scaling: for sequences longer than the original length.
        device: of the result.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    plain = theta**-exponents
    if scaling is None:
        return plain
    turns = scaling.original_length * plain / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    stays = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (stays + (1 - stays) / scaling.factor)


def rope_table(positions: torch.Tensor, rope: Rope) -> RopeTable:
    """Return the table of a batch.

    Args:
        positions: integers [B, L].
        rope: of a layer.
    """
    turning = frequencies(rope.width, rope.theta, rope.scaling, device=positions.device)
    angles = positions[:, None, :, None].float() * turning
    return RopeTable(angles.cos(), angles.sin())


def apply_rope(x: torch.Tensor, rope: RopeTable) -> torch.Tensor:
    """Rotate the pairs (x[i], x[i + W/2]) of each head by their angle, in fp32. W is the width that turns, E or less.

    Args:
        x: queries or keys [B, H, L, E].
        rope: angles of the positions, of W / 2 pairs.
    """
    width = 2 * rope.cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((apply_rope(x[..., :width], rope), x[..., width:]), dim=-1)
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * rope.cos - right * rope.sin, right * rope.cos + left * rope.sin), dim=-1).to(x.dtype)
