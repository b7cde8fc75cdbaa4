"""Adafactor for sharded matrices, with row and column means of the whole matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from tidewheel.train.optimizers.rules.on_device import count_update, groups_to_update, kernel, local
from tidewheel.train.parallel.offloaded import redistributed, whole


class Adafactor(torch.optim.Adafactor):
    """`torch.optim.Adafactor` (https://arxiv.org/abs/1804.04235) whose parameters may be DTensors.

    Each rank keeps the row means of its rows and the column means of its columns. A mean across shards is summed over
    ranks. The formula is torch's, whose code runs if nothing is sharded and the rule is not fused.

    Args:
        params: parameters or parameter groups.
        fused: keep every scalar on the device, so that the host never waits for it, see `on_device`.
        settings: of `torch.optim.Adafactor`.
    """

    def __init__(self, params: Any, *, fused: bool = False, **settings: Any) -> None:
        super().__init__(params, **settings)
        self._step_supports_amp_scaling = fused

    def prepare(self) -> None:
        """Allocate the state of all parameters at zero."""
        for group in self.param_groups:
            for parameter in group["params"]:
                device = parameter.device if self._step_supports_amp_scaling else torch.device("cpu")
                self.state[parameter] = {"step": torch.zeros((), device=device), **_zeros(parameter)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        sharded = any(isinstance(parameter, DTensor) for group in self.param_groups for parameter in group["params"])
        if not (sharded or self._step_supports_amp_scaling):
            super().step(closure)
            return
        assert closure is None
        if self._step_supports_amp_scaling:
            self._step_on_device()
            return
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

    def _step_on_device(self) -> None:
        """Update as `_update` does; scalars are tensors, and the gradient's scale divides sums instead of elements."""
        for group, held, scale, skip in groups_to_update(self):
            count_update([self.state[parameter]["step"] for parameter in held], skip)
            count = self.state[held[0]]["step"]  # all parameters have had the same updates
            share, rate = count ** group["beta2_decay"], count.rsqrt().clamp(max=group["lr"])
            decay = torch.tensor(group["lr"] * group["weight_decay"], dtype=torch.float32)
            for parameter in held:
                least = torch.finfo(parameter.dtype).eps if group["eps"][0] is None else group["eps"][0]
                update = self._direction(parameter, parameter.grad, share, scale, skip, least)
                size = rate * _mean_root(parameter).clamp(min=group["eps"][1])
                clipped = (_mean_root(update) / (scale * group["d"])).clamp(min=1.0)
                _move(local(parameter), local(update), size / (clipped * scale), decay, skip)

    def _direction(self, parameter: torch.Tensor, gradient: torch.Tensor, share: torch.Tensor, scale: torch.Tensor,
                   skip: torch.Tensor, least: float) -> torch.Tensor:
        """Add a gradient to the state of one parameter, and return the gradient over the root of its second moment.

        Args:
            parameter: whose state is updated.
            gradient: before it is divided by `scale`, as is the result.
            share: of this gradient in the second moments.
            scale: divides the gradient.
            skip: whether to leave the state as it is.
            least: of a mean of squares.
        """
        state, squares = self.state[parameter], gradient.square()
        if gradient.dim() == 1:
            _average(state["variance"], squares, 1, share, scale, skip)
            variance = state["variance"].clone()
        else:
            _average(state["row_var"], _whole(squares.sum(-1, keepdim=True)), gradient.shape[-1], share, scale, skip)
            _average(state["col_var"], _whole(squares.sum(-2, keepdim=True)), gradient.shape[-2], share, scale, skip)
            mean = _whole(state["row_var"].sum(-2, keepdim=True)).div_(gradient.shape[-2])
            variance = state["row_var"] * state["col_var"] / mean.clamp_(min=least)
        return variance.clamp_(min=least * least).rsqrt_().mul_(gradient)


def _average(moment: torch.Tensor, sums: torch.Tensor, terms: int, share: torch.Tensor, scale: torch.Tensor,
             skip: torch.Tensor) -> None:
    """Move a second moment towards the mean of `terms` squares, of gradients that `scale` divides."""
    before = local(moment)
    averaged = before.lerp(local(sums) / (terms * scale.square()), share)
    before.copy_(torch.where(skip, before, averaged))


@kernel()
def _move(weight: torch.Tensor, update: torch.Tensor, size: torch.Tensor, decay: torch.Tensor,
          skip: torch.Tensor) -> None:
    """Decay one parameter and subtract `size` times the update."""
    weight.copy_(torch.where(skip, weight, weight * (1 - decay) - size * update))


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
    return redistributed(tensor, [Replicate() if placement.is_partial() else placement
                                  for placement in tensor.placements])


def _rms(tensor: torch.Tensor) -> float:
    """Return the root of the mean square of all elements on all ranks."""
    total = whole(tensor.square().sum())
    return (float(total) / tensor.numel()) ** 0.5


def _mean_root(tensor: torch.Tensor) -> torch.Tensor:
    """Return the root of the mean square of all elements on all ranks, a scalar on the device."""
    norm = whole(torch.linalg.vector_norm(tensor))
    return norm / tensor.numel() ** 0.5
