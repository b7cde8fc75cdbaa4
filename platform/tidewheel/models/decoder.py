"""The decoder, a stack of a model family's blocks between an embedding and an output, and the modules of a block.

Suffixes of names give shapes: B rows, L positions, D model width, H query heads, K key heads, E head width,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tidewheel.models.attention import DocumentMask, choose_kernel, document_attention, document_mask
from tidewheel.models.config import LossConfig
from tidewheel.models.documents import Documents
from tidewheel.models.family import Model
from tidewheel.models.loss import IGNORED, TokenLoss, product_dtype
from tidewheel.models.products import products
from tidewheel.models.rope import RopeTable, apply_rope, rope_table
from tidewheel.parts import calling

HeadObjective = Callable[[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]
"""From normalised hidden states [B, L, D] and the output layer to the loss and its metrics."""


class Embedding(nn.Embedding):
    """An embedding whose result may have a higher precision than its weight."""

    output_dtype: torch.dtype | None = None
    """Dtype of the result; default: that of the weight."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return look_up(tokens, self.weight, self.output_dtype)


def look_up(rows: torch.Tensor, weight_VD: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the rows [..., D] of a matrix.

    The gradients of tokens are added up in the dtype of the result, also if that of the matrix is lower.

    Args:
        rows: int64 [...].
        weight_VD: the matrix.
        dtype: of the result; default: that of the matrix.
    """
    if dtype is None or dtype == weight_VD.dtype:
        return F.embedding(rows, weight_VD)
    return _LookUp.apply(rows, weight_VD, dtype)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight_VD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.size = weight_VD.shape[0]
        return F.embedding(rows, weight_VD).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return None, torch.ops.aten.embedding_dense_backward(grad_outputs[0], rows, ctx.size, -1, False), None


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32 and returned in the dtype of x."""

    def __init__(self, dim: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.epsilon).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with RoPE.

    Args:
        config: shape of the model.
        qk_norm: normalise queries and keys.
        bias: add biases to queries, keys and values, as Qwen 2 does.
    """

    def __init__(self, config: Model, *, qk_norm: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.head_dim = config.head_width
        self.fused = config.fused_products
        self.wq = nn.Linear(config.dim, config.num_heads * self.head_dim, bias=bias)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=bias)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=bias)
        self.wo = nn.Linear(config.num_heads * self.head_dim, config.dim, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.norm_epsilon) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.norm_epsilon) if qk_norm else nn.Identity()

    def forward(self, x_BLD: torch.Tensor, rope: RopeTable, mask: DocumentMask) -> torch.Tensor:
        q, k, v = products(x_BLD, (self.wq, self.wk, self.wv), fused=self.fused)
        q_BHLE = apply_rope(self.q_norm(self._heads(q)), rope)
        k_BKLE = apply_rope(self.k_norm(self._heads(k)), rope)
        v_BKLE = self._heads(v)
        if mask.keys is not None:
            k_BKLE, v_BKLE = mask.keys(self, k_BKLE, v_BKLE)
        out_BHLE = document_attention(q_BHLE, k_BKLE, v_BKLE, mask)
        return self.wo(out_BHLE.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """The feed-forward of Llama, w2(silu(w1 x) * w3 x).

    Args:
        dim: width of the input and the output.
        inner: width between them.
        fused: compute w1 x and w3 x as one product.
    """

    def __init__(self, dim: int, inner: int, *, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.w1 = nn.Linear(dim, inner, bias=False)
        self.w3 = nn.Linear(dim, inner, bias=False)
        self.w2 = nn.Linear(inner, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = products(x, (self.w1, self.w3), fused=self.fused)
        return self.w2(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + ffn(norm(x)).

    Args:
        config: the model family's settings.
        attention: module from (hidden states, rotary table, document mask) to hidden states, [B, L, dim].
        ffn: module from hidden states to hidden states, [B, L, dim].
    """

    def __init__(self, config: Model, attention: nn.Module, ffn: nn.Module) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_epsilon)
        self.attention = attention
        self.ffn_norm = RMSNorm(config.dim, config.norm_epsilon)
        self.ffn = ffn

    def forward(self, x: torch.Tensor, rope: RopeTable, mask: DocumentMask) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rope, mask)
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    """A decoder from tokens to logits, or to a loss if targets are given.

    Parameters are uninitialised, because the module may be built on the meta device; `initial_values` has their
    initial values. A pipeline stage is a decoder with fewer blocks. Without `embedding` it takes the residual stream
    in the place of tokens; without `norm` it returns the residual stream.

    Args:
        config: the model family's settings.
        vocabulary_size: number of rows of the embedding and the output.
        loss: settings of the cross-entropy.
    """

    def __init__(self, config: Model, vocabulary_size: int, loss: LossConfig | None = None) -> None:
        super().__init__()
        self.config, self.vocabulary_size = config, vocabulary_size
        self.embedding: Embedding | None = Embedding(vocabulary_size, config.dim)
        with calling(config):
            self.blocks = nn.ModuleList(config.block() for _ in range(config.num_layers))
        self.norm: RMSNorm | None = RMSNorm(config.dim, config.norm_epsilon)
        self.output = None if config.tie_embeddings else nn.Linear(config.dim, vocabulary_size, bias=False)
        self.token_loss = TokenLoss(loss or LossConfig())

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, segment_ids: torch.Tensor,
                targets: torch.Tensor | None = None, objective: HeadObjective | None = None,
                documents: Documents | None = None) -> torch.Tensor:
        """Return logits, or the loss.

        Args:
            tokens: int64 [B, L].
            positions: integers [B, L], from 0 in each document.
            segment_ids: integers [B, L], see `document_mask`.
            targets: int64 [B, L] from `next_tokens`.
            objective: computes the loss from normalised hidden states and the output layer.
            documents: where documents begin, if it is known on the host; see `document_mask`.

        Returns:
            Without targets, logits [B, L, V]. With an objective, its result. Otherwise the sum over positions of the
            cross-entropy in nats, an fp32 scalar.
        """
        x_BLD = tokens if self.embedding is None else self.embedding(tokens)
        rope, mask = self.rope(positions), self.mask(segment_ids, x_BLD, documents)
        for block in self.blocks:
            x_BLD = block(x_BLD, rope, mask)
        return x_BLD if self.norm is None else self.head(x_BLD, targets, objective)

    def rope(self, positions: torch.Tensor) -> RopeTable:
        """Return the RoPE angles of `positions` [B, L], for all blocks."""
        return rope_table(positions, self.config.head_width, self.config.rope_theta, self.config.rope_scaling)

    def mask(self, segment_ids: torch.Tensor, x: torch.Tensor, documents: Documents | None = None) -> DocumentMask:
        """Return the attention mask for all blocks.

        Context parallelism and a cache of keys replace this method by one whose mask has `keys`.

        Args:
            segment_ids: integers [B, L].
            x: input of the first block [B, L, D].
            documents: see `forward`.
        """
        config = self.config
        kernel = choose_kernel(config.attention, x.device, product_dtype(x), head_width=config.head_width,
                               documents=documents, flash=config.flash_attention)
        return document_mask(segment_ids, kernel, documents=documents)

    def head(self, x_BLD: torch.Tensor, targets: torch.Tensor | None = None,
             objective: HeadObjective | None = None) -> torch.Tensor:
        """Return logits or the loss of the residual stream after the last block.

        Args:
            x_BLD: the residual stream.
            targets: see `forward`.
            objective: see `forward`.
        """
        assert self.norm is not None
        x_BLD = self.norm(x_BLD)
        if objective is not None:
            return objective(x_BLD, self.logits)
        return self.logits(x_BLD) if targets is None else self.token_loss(x_BLD, self.logits, self.weight, targets)

    def logits(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, L, V] of normalised hidden states."""
        return F.linear(x_BLD, self.weight) if self.output is None else self.output(x_BLD)

    @property
    def weight(self) -> torch.Tensor:
        """Return the output matrix [V, D]."""
        matrix = self.embedding if self.output is None else self.output
        assert matrix is not None
        return matrix.weight


def next_tokens(tokens: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
    """Return the targets, int64 [B, L]: the next token of the same document.

    The last token of a document and padding have `IGNORED`.

    Args:
        tokens: int64 [B, L].
        segment_ids: integers [B, L]; below 0 for padding.
    """
    targets = torch.full_like(tokens, IGNORED)
    inside = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] >= 0)
    targets[:, :-1] = torch.where(inside, tokens[:, 1:], IGNORED)
    return targets
