"""Feed-forwards: gated ones (SwiGLU, GeGLU) and the plain one of GPT-2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from tidewheel.models.products import Products

Activation = Callable[[torch.Tensor], torch.Tensor]
gelu_tanh: Activation = partial(F.gelu, approximate="tanh")
"""GELU by its tanh approximation (https://arxiv.org/abs/1606.08415), as GPT-2 and Gemma compute it."""


class GatedFeedForward(nn.Module):
    """w2(activation(w1 x) * w3 x), https://arxiv.org/abs/2002.05202.

    Args:
        dim: width of the input and the output.
        inner: width between them.
        activation: of the gate.
        fused: compute w1 x and w3 x as one product.
    """

    def __init__(self, dim: int, inner: int, activation: Activation = F.silu, *, fused: bool = False) -> None:
        super().__init__()
        self.activation = activation
        self.products = Products(fused)
        self.w1 = nn.Linear(dim, inner, bias=False)
        self.w3 = nn.Linear(dim, inner, bias=False)
        self.w2 = nn.Linear(inner, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.products(x, (self.w1, self.w3))
        return self.w2(self.activation(gate) * up)


class SwiGLU(GatedFeedForward):
    """The feed-forward of Llama, w2(silu(w1 x) * w3 x).

    Args:
        dim: width of the input and the output.
        inner: width between them.
        fused: compute w1 x and w3 x as one product.
    """

    def __init__(self, dim: int, inner: int, *, fused: bool = False) -> None:
        super().__init__(dim, inner, fused=fused)


class Mlp(nn.Module):
    """w2(activation(w1 x)), with biases.

    Args:
        dim: width of the input and the output.
        inner: width between them.
        activation: between the products.
    """

    def __init__(self, dim: int, inner: int, activation: Activation = gelu_tanh) -> None:
        super().__init__()
        self.activation = activation
        self.products = Products()
        self.w1 = nn.Linear(dim, inner)
        self.w2 = nn.Linear(inner, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (inner,) = self.products(x, (self.w1,))
        return self.w2(self.activation(inner))
