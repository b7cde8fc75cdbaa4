"""Multi-head latent attention: keys and values of all heads come from one narrow vector of each token.

DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1. In training, keys and values are expanded to all heads; a
cache holds them expanded too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from tidewheel.models.attention import DocumentMask, document_attention
from tidewheel.models.blocks.norms import RMSNorm
from tidewheel.models.rope import RopeTable, apply_rope

LATENT_EPSILON = 1e-6
"""Of the norms of latent vectors, whatever the model's own, as in
https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/inference/model.py."""


@dataclass(frozen=True)
class LatentWidths:
    """Widths of latent attention.

    Args:
        query_rank: width of the latent vector of queries; None: queries come from the residual stream.
        key_rank: width of the latent vector of keys and values.
        plain: entries of a query or key head that do not turn.
        turning: entries that RoPE turns; keys share them among heads.
        value: width of a value head.
    """

    query_rank: int | None
    key_rank: int
    plain: int
    turning: int
    value: int


class LatentAttention(nn.Module):
    """Attention whose keys and values are expanded from a latent vector.

    Args:
        dim: width of the residual stream.
        heads: number of heads.
        widths: of heads and latent vectors.
        scale: factor of the scores.
    """

    def __init__(self, dim: int, heads: int, widths: LatentWidths, scale: float) -> None:
        super().__init__()
        self.widths, self.scale = widths, scale
        per_head = widths.plain + widths.turning
        rank = widths.query_rank
        self.wq_a = None if rank is None else nn.Linear(dim, rank, bias=False)
        self.q_norm = None if rank is None else RMSNorm(rank, LATENT_EPSILON)
        self.wq_b = nn.Linear(dim if rank is None else rank, heads * per_head, bias=False)
        self.wkv_a = nn.Linear(dim, widths.key_rank + widths.turning, bias=False)
        self.kv_norm = RMSNorm(widths.key_rank, LATENT_EPSILON)
        self.wkv_b = nn.Linear(widths.key_rank, heads * (widths.plain + widths.value), bias=False)
        self.wo = nn.Linear(heads * widths.value, dim, bias=False)

    def forward(self, x_BLD: torch.Tensor, rope: RopeTable, mask: DocumentMask) -> torch.Tensor:
        if isinstance(x_BLD, DTensor):  # tensor parallelism: each rank has the gradient through its own heads
            x_BLD = x_BLD.to_local(grad_placements=[Partial()])
        widths = self.widths
        q_BHLE = self._queries(x_BLD, rope)
        latent, turning = _product(self.wkv_a, x_BLD).split([widths.key_rank, widths.turning], dim=-1)
        expanded = _heads(_product(self.wkv_b, _normed(self.kv_norm, latent)), widths.plain + widths.value)
        k_plain, v = expanded.split([widths.plain, widths.value], dim=-1)
        k_turned = apply_rope(_pairs_apart(turning[:, None]), rope).expand(-1, k_plain.shape[1], -1, -1)
        k_BHLE = torch.cat((k_plain, k_turned), dim=-1)
        width = max(k_BHLE.shape[-1], widths.value)  # kernels and caches take keys and values of one width
        q_BHLE, k_BHLE, v = _padded(q_BHLE, width), _padded(k_BHLE, width), _padded(v, width)
        if mask.keys is not None:
            k_BHLE, v = mask.keys(self, k_BHLE, v)
        out_BHLE = document_attention(q_BHLE, k_BHLE, v, mask, scale=self.scale)[..., :widths.value]
        return self.wo(out_BHLE.transpose(1, 2).flatten(2))

    def _queries(self, x_BLD: torch.Tensor, rope: RopeTable) -> torch.Tensor:
        widths = self.widths
        if self.wq_a is not None and self.q_norm is not None:
            x_BLD = _normed(self.q_norm, _product(self.wq_a, x_BLD))
        q = _heads(_product(self.wq_b, x_BLD), widths.plain + widths.turning)
        plain, turning = q.split([widths.plain, widths.turning], dim=-1)
        return torch.cat((plain, apply_rope(_pairs_apart(turning), rope)), dim=-1)


def _heads(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return [B, H, L, width] of [B, L, H width]."""
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def _pairs_apart(x: torch.Tensor) -> torch.Tensor:
    """Return entries in the order (0, 2, 4, ..., 1, 3, ...): DeepSeek turns neighbours, `apply_rope` turns halves.

    Queries and keys change alike, so their product stays.
    """
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _product(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, _local(layer.weight)) if isinstance(layer.weight, DTensor) else layer(x)


def _normed(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    weight = _local(norm.weight).float()
    return F.rms_norm(x.float(), (x.shape[-1],), weight, norm.epsilon).to(x.dtype)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part; ranks that hold the same values have parts of their gradient."""
    if not isinstance(parameter, DTensor):
        return parameter
    placements: Any = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
    return parameter.to_local(grad_placements=placements)
