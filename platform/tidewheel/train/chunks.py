"""Functions of hidden states computed a few tokens at a time, so that few logits are in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from tidewheel.models.loss import IGNORED


def chunked(function: Callable[..., torch.Tensor], size: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return `function` of each chunk; with several, the backward pass computes each again.

    Args:
        function: of one part of each tensor.
        size: rows of a chunk, of the first dimension.
        tensors: of equal length, one at least.
    """
    if len(tensors[0]) <= size:
        return [function(*tensors)]
    return [checkpoint(function, *parts, use_reentrant=False, preserve_rng_state=False)
            for parts in zip(*(tensor.split(size) for tensor in tensors))]


def with_target(targets: torch.Tensor, known: int) -> torch.Tensor:
    """Return the indices of positions that have a target, int64 [known], rising.

    A stable sort has them first; `nonzero` would make the host wait for a GPU.

    Args:
        targets: int64 [N].
        known: number of targets that are not `IGNORED`.
    """
    return (targets == IGNORED).to(torch.uint8).argsort(stable=True)[:known]
