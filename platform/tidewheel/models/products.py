"""Several matrix products with one input, apart or as one product with all matrices.

One product of a wide matrix uses a GPU better than several of narrow ones, and reads its input once. The matrices stay
parameters of their own, so checkpoints, initial values, optimizers and Hugging Face names know nothing of it. Putting
them side by side copies them, which takes about 1 % of a product with 8,192 tokens or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from tidewheel.models.loss import product_dtype


@dataclass(frozen=True)
class Products:
    """Computes the outputs of several linear layers with one input.

    A module of a block has it as its attribute `products` if it reads the residual stream in no other way. Then tensor
    parallelism can replace it by one whose input has this rank's positions only.
    """

    fused: bool = False
    """Compute one product. Hooks of the layers then do not run."""

    def __call__(self, x: torch.Tensor, layers: Sequence[nn.Linear]) -> Sequence[torch.Tensor]:
        """Return `products(x, layers, fused=self.fused)`."""
        return products(x, layers, fused=self.fused)


def products(x: torch.Tensor, layers: Sequence[nn.Linear], *, fused: bool) -> Sequence[torch.Tensor]:
    """Return the output of each layer.

    Under tensor parallelism the matrices are sharded by columns, and outputs are this rank's part, as they are apart.

    Args:
        x: input of all layers, [..., D].
        layers: linear layers with D inputs; all have a bias, or none has.
        fused: compute one product. Hooks of the layers then do not run.
    """
    if not fused:
        return [layer(x) for layer in layers]
    if isinstance(x, DTensor):
        x = x.to_local(grad_placements=[Partial()])  # each rank has the gradient through its own columns
    weight, bias = side_by_side(layers, product_dtype(x))
    return split(F.linear(x, weight, bias), layers)


def side_by_side(layers: Sequence[nn.Linear], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return one matrix [outputs, D] of several layers, and one bias [outputs] or None.

    Args:
        layers: all have a bias, or none has.
        dtype: of the result. Values are converted before they are put side by side, so that half of the bytes are
            copied.
    """
    weights = [local(layer.weight).to(dtype) for layer in layers]
    biases = [local(layer.bias).to(dtype) for layer in layers if layer.bias is not None]
    return torch.cat(weights), torch.cat(biases) if biases else None


def split(out: torch.Tensor, layers: Sequence[nn.Linear]) -> Sequence[torch.Tensor]:
    """Return each layer's part of [..., outputs]."""
    return out.split([len(local(layer.weight)) for layer in layers], dim=-1)


def local(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
