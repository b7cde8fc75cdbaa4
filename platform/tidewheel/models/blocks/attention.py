"""Grouped-query attention as a module of a block."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tidewheel.models.attention import DocumentMask, document_attention
from tidewheel.models.blocks.norms import WidthNorm
from tidewheel.models.family import Model
from tidewheel.models.products import Products
from tidewheel.models.rope import RopeTable, apply_rope

Normed = Literal["", "heads", "width"]
"""What is normalised before RoPE: nothing, each query and key head, or all heads together."""


class Sinks(nn.Module):
    """One learned logit for each query head, that takes part in the softmax and has no value (GPT-OSS)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))

    def forward(self) -> torch.Tensor:
        """Return the logits of this rank's heads, [H]."""
        return self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight


class Attention(nn.Module):
    """Grouped-query attention, with RoPE if the layer has one.

    Args:
        config: shape of the model.
        qk_norm: what to normalise; True: each query and key head.
        bias: add biases to queries, keys and values, as Qwen 2 does.
        output_bias: add a bias to the output.
        scale: factor of the scores; default: 1 / sqrt(head width).
        soft_cap: c of c tanh(scores / c), as in Gemma 2 (https://arxiv.org/abs/2408.00118, section 2).
        sinks: whether each head has a `Sinks` logit.
    """

    def __init__(self, config: Model, *, qk_norm: bool | Normed = "", bias: bool = False, output_bias: bool = False,
                 scale: float | None = None, soft_cap: float | None = None, sinks: bool = False) -> None:
        super().__init__()
        self.head_dim = config.head_width
        self.products = Products(config.fused_products)
        self.scale, self.soft_cap = scale, soft_cap
        queries, keys = config.num_heads * self.head_dim, config.kv_heads * self.head_dim
        self.wq = nn.Linear(config.dim, queries, bias=bias)
        self.wk = nn.Linear(config.dim, keys, bias=bias)
        self.wv = nn.Linear(config.dim, keys, bias=bias)
        self.wo = nn.Linear(queries, config.dim, bias=output_bias)
        self.norms_width = qk_norm == "width"
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if self.norms_width:
            self.q_norm = WidthNorm(queries, config.norm_epsilon)
            self.k_norm = WidthNorm(keys, config.norm_epsilon)
        elif qk_norm:
            self.q_norm = config.norm(self.head_dim)
            self.k_norm = config.norm(self.head_dim)
        self.sinks = Sinks(config.num_heads) if sinks else None

    def forward(self, x_BLD: torch.Tensor, rope: RopeTable | None, mask: DocumentMask) -> torch.Tensor:
        q, k, v = self.products(x_BLD, (self.wq, self.wk, self.wv))
        q_BHLE, k_BKLE = self._normed(self.q_norm, q), self._normed(self.k_norm, k)
        v_BKLE = self._heads(v)
        if rope is not None:
            q_BHLE, k_BKLE = apply_rope(q_BHLE, rope), apply_rope(k_BKLE, rope)
        if mask.keys is not None:
            k_BKLE, v_BKLE = mask.keys(self, k_BKLE, v_BKLE)
        sinks = None if self.sinks is None else self.sinks()
        out_BHLE = document_attention(q_BHLE, k_BKLE, v_BKLE, mask, scale=self.scale, soft_cap=self.soft_cap,
                                      sinks=sinks)
        return self.wo(out_BHLE.transpose(1, 2).flatten(2))

    def _normed(self, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return normalised heads [B, H, L, E] of queries or keys [B, L, H E]."""
        return self._heads(norm(x)) if self.norms_width else norm(self._heads(x))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
