"""Rotary position embedding (https://arxiv.org/abs/2104.09864), with Llama 3.1's scaling for long sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tidewheel.models.config import RopeScaling


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines of a batch, fp32 [B, 1, L, E / 2]; computed once and shared by all layers.

    No pytree, so that FSDP's mixed precision, which casts the tensors among a block's inputs, leaves it in fp32.
    """

    cos: torch.Tensor
    sin: torch.Tensor


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None, *,
                device: torch.device | str = "cpu") -> torch.Tensor:
    """Angle per position of each pair, fp32 [head_dim / 2]: theta ** (-2 i / head_dim).

    With `scaling`, pairs that turn fewer than `low_frequency_factor` times in the original length are slowed down by
    `factor`, those that turn more than `high_frequency_factor` times stay, and between the two the share that stays
    rises linearly with the number of turns (Llama 3.1's reference code).
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    plain = theta**-exponents
    if scaling is None:
        return plain
    turns = scaling.original_length * plain / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    stays = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (stays + (1 - stays) / scaling.factor)


def rope_table(positions: torch.Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> RopeTable:
    """The table for `positions`, integers [B, L]."""
    turning = frequencies(head_dim, theta, scaling, device=positions.device)
    angles = positions[:, None, :, None].float() * turning
    return RopeTable(angles.cos(), angles.sin())


def apply_rope(x: torch.Tensor, rope: RopeTable) -> torch.Tensor:
    """Turn the pairs (x[i], x[i + E/2]) of each head by their angle; x is [B, H, L, E]. Computed in fp32."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * rope.cos - right * rope.sin, right * rope.cos + left * rope.sin), dim=-1).to(x.dtype)
