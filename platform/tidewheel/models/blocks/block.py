"""A decoder's block: attention and a feed-forward, each added to the residual stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tidewheel.models.attention import DocumentMask
from tidewheel.models.family import Model
from tidewheel.models.rope import RopeTable


class Block(nn.Module):
    """Add attention, then a feed-forward, to the residual stream: x + post(part(pre(x))).

    Args:
        config: the model family's settings.
        attention: module from (hidden states, rotary table, document mask) to hidden states, [B, L, dim].
        ffn: module from hidden states to hidden states, [B, L, dim]; a mixture of experts returns its routing as well.
        pre_norm: normalise what a part reads.
        post_norm: normalise what a part adds (Gemma 2, OLMo 2).
    """

    def __init__(self, config: Model, attention: nn.Module, ffn: nn.Module, *, pre_norm: bool = True,
                 post_norm: bool = False) -> None:
        super().__init__()
        self.attention_norm: nn.Module = config.norm() if pre_norm else nn.Identity()
        self.attention = attention
        self.attention_post_norm: nn.Module = config.norm() if post_norm else nn.Identity()
        self.ffn_norm: nn.Module = config.norm() if pre_norm else nn.Identity()
        self.ffn = ffn
        self.ffn_post_norm: nn.Module = config.norm() if post_norm else nn.Identity()

    def forward(self, x: torch.Tensor, rope: RopeTable | None, mask: DocumentMask) -> Any:
        """Return the residual stream [B, L, D]; with a mixture of experts, (the stream, its routing)."""
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x), rope, mask))
        added = self.ffn(self.ffn_norm(x))
        if isinstance(added, tuple):
            added, routing = added
            return x + self.ffn_post_norm(added), routing
        return x + self.ffn_post_norm(added)
