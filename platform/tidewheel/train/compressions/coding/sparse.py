"""Sums of some elements of a gradient."""

from __future__ import annotations

import torch

from tidewheel.train.compression import At, Exchange, Gather, Sum
from tidewheel.train.compressions.coding.counter import uniform


def largest(values: torch.Tensor, kept: int) -> Exchange:
    """Sum the elements of each slot that are largest in absolute value; see `Compression.sum`.

    Args:
        values: of the own slots.
        kept: number of elements.
    """
    own = values.abs().topk(kept, dim=1, sorted=False).indices  # not a number counts as the largest
    picked = values.gather(1, own)
    values.scatter_(1, own, 0.0)
    indices, sent = yield Gather(own.int(), picked)
    total = values.new_zeros(values.shape[1])
    for index, value in zip(indices.unbind(), sent.unbind()):  # in the order of the slots
        total.index_add_(0, index, value)
    return total


def random(values: torch.Tensor, kept: int, at: At) -> Exchange:
    """Sum random elements that are the same in all slots: one of each of `kept` pieces; see `Compression.sum`.

    Args:
        values: of the own slots.
        kept: number of elements.
        at: which gradient, and when.
    """
    count, device = values.shape[1], values.device
    bounds = torch.arange(kept + 1, device=device) * count // kept
    offsets = uniform(at, "elements", range(1), kept, device)[0] * (bounds[1:] - bounds[:-1])
    indices = torch.minimum(bounds[:-1] + offsets.long(), bounds[1:] - 1)
    tainted = values.abs().amax(dim=1, keepdim=True) * 0.0  # not a number if an element that stays is not
    sent = values[:, indices] + tainted
    values[:, indices] = 0.0
    total = yield Sum(sent)
    return values.new_zeros(count).index_copy_(0, indices, total)
