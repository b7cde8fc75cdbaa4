"""The outer step: stochastic gradient descent with Nesterov momentum on the mean of the groups' outer gradients.

Each operation is one rounding of one element, so the result has the same bits on every rank and in every layout.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

Tensors = list[torch.Tensor]


@torch.no_grad()
def mean(members: Iterable[Tensors]) -> list[torch.Tensor]:
    """Return the mean of the members' tensors, added in their order.

    Args:
        members: fp32 tensors of each member, at least one.
    """
    total: list[torch.Tensor] = []
    count = 0
    for tensors in members:
        count += 1
        if count == 1:
            total = [tensor.clone() for tensor in tensors]
        elif total:
            torch._foreach_add_(total, tensors)
    if total and count > 1:
        torch._foreach_div_(total, float(count))
    return total


@torch.no_grad()
def outer_step(weights: Tensors, momenta: Tensors, gradients: Tensors, *, learning_rate: float,
               momentum: float) -> None:
    """Take an outer step in place, as `torch.optim.SGD(nesterov=True)` does: m = mu m + g, w = w - rate (g + mu m).

    Args:
        weights: fp32, of the last outer state.
        momenta: fp32, of the last outer state; ignored without momentum.
        gradients: fp32; their values are lost.
        learning_rate: the outer rate.
        momentum: mu.
    """
    if not weights:
        return
    if momentum:
        torch._foreach_mul_(momenta, momentum)
        torch._foreach_add_(momenta, gradients)
        torch._foreach_add_(gradients, torch._foreach_mul(momenta, momentum))
    torch._foreach_mul_(gradients, learning_rate)
    torch._foreach_sub_(weights, gradients)
