"""Rotary position embedding (https://arxiv.org/abs/2104.09864), also scaled for longer sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tidewheel.models.config import Rope
from tidewheel.models.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines of a batch, fp32 [B, 1, L, E / 2], computed once and shared by all layers of one `Rope`.

    It is not a pytree: FSDP's mixed precision casts the tensors among a block's inputs, and must leave these in fp32.
    """

    cos: torch.Tensor
    sin: torch.Tensor


def frequencies(rope: Rope, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the angle per position of each pair, fp32 [width / 2]: theta ** (-2 i / width), scaled.

    Args:
        rope: of a layer.
        device: of the result.
    """
    scaling, theta = rope.scaling, rope.theta
    if isinstance(scaling, DynamicScaling):
        theta = _dynamic_theta(rope, scaling)
    exponents = torch.arange(0, rope.width, 2, device=device, dtype=torch.float32) / rope.width
    plain = theta**-exponents
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor
    if isinstance(scaling, YarnScaling):
        stays = _yarn_stays(rope, scaling, device)
        return plain / scaling.factor * (1 - stays) + plain * stays
    return _llama3(plain, scaling) if isinstance(scaling, Llama3Scaling) else plain


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Return frequencies scaled as in Llama 3.1's reference code, by their turns in the original length.

    Fewer than `low_frequency_factor` turns: divided by `factor`. More than `high_frequency_factor`: unchanged. Between:
    interpolated linearly by the number of turns.
    """
    turns = scaling.original_length * plain / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    stays = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (stays + (1 - stays) / scaling.factor)


def _dynamic_theta(rope: Rope, scaling: DynamicScaling) -> float:
    """Return theta (factor length / original - (factor - 1)) ** (width / (width - 2)), for `rope.length`."""
    stretched = max(rope.length, scaling.original_length) / scaling.original_length
    grown: float = (scaling.factor * stretched - (scaling.factor - 1)) ** (rope.width / (rope.width - 2))
    return rope.theta * grown


def _yarn_stays(rope: Rope, scaling: YarnScaling, device: torch.device | str) -> torch.Tensor:
    """Return the share of each frequency that stays, fp32 [width / 2]: 1 for fast pairs, 0 for slow ones.

    A ramp lies between. The pair of n turns in the original length is width ln(original / (2 pi n)) / (2 ln theta).
    """
    def pair(turns: float) -> float:
        return rope.width * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.width - 1)
    pairs = torch.arange(rope.width // 2, device=device, dtype=torch.float32)
    return 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)


def rope_table(positions: torch.Tensor, rope: Rope) -> RopeTable:
    """Return the table of a batch. YaRN multiplies cosines and sines by its magnitude.

    Args:
        positions: integers [B, L].
        rope: of a layer.
    """
    angles = positions[:, None, :, None].float() * frequencies(rope, positions.device)
    if isinstance(rope.scaling, YarnScaling):
        return RopeTable(angles.cos() * rope.scaling.magnitude, angles.sin() * rope.scaling.magnitude)
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
