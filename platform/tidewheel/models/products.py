"""Several matrix products with one input, apart or as one product with all matrices.

One product of a wide matrix uses a GPU better than several of narrow ones, and reads its input once. The matrices stay
parameters of their own, so checkpoints, initial values, optimizers and Hugging Face names know nothing of it. Putting
them side by side copies them, which takes about 1 % of a product with 8,192 tokens or more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from tidewheel.models.loss import product_dtype


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
    dtype = product_dtype(x)  # before they are put side by side, so that half of the bytes are copied
    weights = [_local(layer.weight).to(dtype) for layer in layers]
    biases = [_local(layer.bias).to(dtype) for layer in layers if layer.bias is not None]
    out = F.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)
    return out.split([len(weight) for weight in weights], dim=-1)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
