"""The embedding of tokens, with learned positions and a scale where a family has them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tidewheel.models.noise import EmbeddingNoise


class Embedding(nn.Embedding):
    """An embedding whose result may have a higher precision than its weight.

    Args:
        rows: size of the vocabulary.
        dim: width of the result.
        positions: number of learned positions, which are added; 0: none.
        scale: factor of the tokens' rows, sqrt(dim) in Gemma.
    """

    output_dtype: torch.dtype | None = None
    """Dtype of the result; default: that of the weight."""

    def __init__(self, rows: int, dim: int, *, positions: int = 0, scale: float = 1.0) -> None:
        super().__init__(rows, dim)
        self.scale = scale
        self.positions = nn.Parameter(torch.empty(positions, dim)) if positions else None

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None,
                noise: EmbeddingNoise | None = None) -> torch.Tensor:
        """Return the embeddings [B, L, D].

        Args:
            tokens: int64 [B, L].
            positions: integers [B, L], from 0 in each document; needed if they are learned.
            noise: is added to the result.
        """
        x_BLD = look_up(tokens, self.weight, self.output_dtype)
        if self.scale != 1.0:
            x_BLD = x_BLD * self.scale
        if self.positions is not None:
            assert positions is not None
            x_BLD = x_BLD + look_up(positions, self.positions, self.output_dtype)
        return x_BLD if noise is None else noise.added(x_BLD)

    def look_up(self, tokens: torch.Tensor, rows_VN: torch.Tensor) -> torch.Tensor:
        """Return the rows [B, L, N] of another matrix [V, N], which has a row for each token as the embedding has."""
        return look_up(tokens, rows_VN)


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
