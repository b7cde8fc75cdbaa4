"""Adafactor for sharded matrices, with row and column means of the whole matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate


class Adafactor(torch.optim.Adafactor):
    """`torch.optim.Adafactor` (https://arxiv.org/abs/1804.04235) whose parameters may be DTensors.

    Each rank keeps the row means of its rows and the column means of its columns. A mean across shards is summed over
    ranks. The formula is torch's, whose code runs if nothing is sharded.
    """

    def prepare(self) -> None:
        """Allocate the state of all parameters at zero."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"step": torch.tensor(0.0), **_zeros(parameter)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        if not any(isinstance(parameter, DTensor) for group in self.param_groups for parameter in group["params"]):
            super().step(closure)
            return
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Update one parameter as torch's `_single_tensor_adafactor` does, with reductions over all ranks."""
        state = self.state[parameter]
        least = torch.finfo(parameter.dtype).eps if group["eps"][0] is None else group["eps"][0]
        state["step"] += 1
        step = float(state["step"])
        new = step ** group["beta2_decay"]
        size = max(group["eps"][1], _rms(parameter)) * min(group["lr"], step**-0.5)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        squares = gradient.square()
        if gradient.dim() > 1:
            state["row_var"].lerp_(_whole(squares.sum(-1, keepdim=True)).div_(gradient.shape[-1]), new)
            state["col_var"].lerp_(_whole(squares.sum(-2, keepdim=True)).div_(gradient.shape[-2]), new)
            mean = _whole(state["row_var"].sum(-2, keepdim=True)).div_(gradient.shape[-2])
            variance = state["row_var"] * state["col_var"] / mean.clamp_(min=least)
        else:
            state["variance"].lerp_(squares, new)
            variance = state["variance"].clone()
        update = variance.clamp_(min=least * least).rsqrt_().mul_(gradient)
        parameter.add_(update, alpha=-size / max(1.0, _rms(update) / group["d"]))


def _zeros(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the initial state: a mean per row and per column of a matrix, else one value per element."""
    zeros = torch.zeros_like(parameter)
    if parameter.dim() < 2:
        return {"variance": zeros}
    return {"row_var": _whole(zeros.sum(-1, keepdim=True)), "col_var": _whole(zeros.sum(-2, keepdim=True))}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor after its pending sums over ranks."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=[Replicate() if placement.is_partial() else placement
                                           for placement in tensor.placements])


def _rms(tensor: torch.Tensor) -> float:
    """Return the root of the mean square of all elements on all ranks."""
    total = tensor.square().sum()
    if isinstance(total, DTensor):
        total = total.full_tensor()
    return (float(total) / tensor.numel()) ** 0.5
