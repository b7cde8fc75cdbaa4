"""The decoder: a stack of pre-norm blocks with RMSNorm, RoPE, grouped-query attention and SwiGLU.

As in Llama 3 (https://arxiv.org/abs/2407.21783) and, with `qk_norm`, Qwen 3 (https://arxiv.org/abs/2505.09388).
Suffixes of names give shapes: B rows, L positions, D model width, H query heads, K key heads, E head width,
V vocabulary.
"""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import nn

from tidewheel.models.attention import document_attention, document_mask
from tidewheel.models.config import ModelConfig

IGNORED = -100
"""Target of a position that has nothing to predict."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32, in the type of x afterwards."""

    def __init__(self, dim: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.epsilon).to(x.dtype)


def rope_table(positions: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for `positions` [B, L]: two fp32 tensors [B, 1, L, head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[:, None, :, None].float() * theta**-exponents
    return angles.cos(), angles.sin()


def apply_rope(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn the pairs (x[i], x[i + E/2]) of each head by their angle; x is [B, H, L, E]. Computed in fp32."""
    cos, sin = rope
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with RoPE and optional norms on queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_width
        self.wq = nn.Linear(config.dim, config.num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.num_heads * self.head_dim, config.dim, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.norm_epsilon) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.norm_epsilon) if config.qk_norm else nn.Identity()

    def forward(self, x_BLD: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        q_BHLE = apply_rope(self.q_norm(self._heads(self.wq(x_BLD))), rope)
        k_BKLE = apply_rope(self.k_norm(self._heads(self.wk(x_BLD))), rope)
        v_BKLE = self._heads(self.wv(x_BLD))
        out_BHLE = document_attention(q_BHLE, k_BKLE, v_BKLE, mask)
        return self.wo(out_BHLE.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, inner, bias=False)
        self.w3 = nn.Linear(dim, inner, bias=False)
        self.w2 = nn.Linear(inner, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_epsilon)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_epsilon)
        self.ffn = FeedForward(config.dim, config.ffn_width)

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rope, mask)
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    """Tokens to logits, or to a loss when targets are given.

    Parameters are left unset (the module may be built on the meta device): call `init_parameter` for each.
    """

    def __init__(self, config: ModelConfig, vocabulary_size: int) -> None:
        super().__init__()
        self.config, self.vocabulary_size = config, vocabulary_size
        self.embedding = nn.Embedding(vocabulary_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_epsilon)
        self.output = None if config.tie_embeddings else nn.Linear(config.dim, vocabulary_size, bias=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, segment_ids: torch.Tensor,
                targets: torch.Tensor | None = None) -> torch.Tensor:
        """Logits, or the loss.

        Args:
            tokens: [B, L] int64.
            positions: [B, L] integers, starting again at 0 in each document.
            segment_ids: [B, L] integers, see `document_mask`.
            targets: [B, L] int64 from `next_tokens`.

        Returns:
            [B, L, V] logits; with targets the SUM over positions of the cross-entropy in nats, fp32, a scalar.
        """
        rope = rope_table(positions, self.config.head_width, self.config.rope_theta)
        mask = document_mask(segment_ids)
        x_BLD = self.embedding(tokens)
        for block in self.blocks:
            x_BLD = block(x_BLD, rope, mask)
        x_BLD = self.norm(x_BLD)
        logits_BLV = F.linear(x_BLD, self.embedding.weight) if self.output is None else self.output(x_BLD)
        if targets is None:
            return logits_BLV
        return F.cross_entropy(logits_BLV.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED,
                               reduction="sum")


def next_tokens(tokens: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
    """Targets [B, L] int64: the next token of the same document, else `IGNORED` (last of a document, padding)."""
    targets = torch.full_like(tokens, IGNORED)
    inside = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] >= 0)
    targets[:, :-1] = torch.where(inside, tokens[:, 1:], IGNORED)
    return targets


def init_parameter(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> torch.Tensor:
    """Initial value of one whole parameter, fp32 on CPU: a function of (seed, name, shape) alone.

    Norm weights are 1. Matrices are normal with `config.weight_std`, divided by sqrt(2 num_layers) for the
    projections that write to the residual stream (GPT-2), so that its variance does not grow with depth.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    std = config.weight_std
    if name.endswith(("attention.wo.weight", "ffn.w2.weight")):
        std /= math.sqrt(2 * config.num_layers)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)
