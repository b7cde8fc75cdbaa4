"""Gradient descent with momentum for sharded parameters, which torch's fused kernel does not take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tidewheel.train.optimizers.rules.on_device import groups_to_update, kernel, local


class SGD(torch.optim.SGD):
    """`torch.optim.SGD` without dampening, for parameters that may be DTensors.

        g <- g + weight_decay p;   m <- momentum m + g;   p <- p - lr (g + momentum m if nesterov else m)

    It is element-wise, so each rank updates its part of a sharded parameter.

    Args:
        params: parameters or parameter groups.
        fused: update each parameter with one kernel that takes the gradient's scale and whether to update on the
            device, see `on_device`.
        settings: of `torch.optim.SGD`.
    """

    def __init__(self, params: Any, *, fused: bool = False, **settings: Any) -> None:
        super().__init__(params, foreach=True, **settings)
        self._step_supports_amp_scaling = fused

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        if not self._step_supports_amp_scaling:
            super().step(closure)
            return
        assert closure is None
        for group, held, scale, skip in groups_to_update(self):
            rate = torch.tensor(group["lr"], dtype=torch.float32)
            for parameter in held:
                weight = local(parameter)
                moment = self.state[parameter].get("momentum_buffer")
                _descend(weight, local(parameter.grad), None if moment is None else local(moment), scale, skip, rate,
                         group["momentum"], group["weight_decay"], group["nesterov"])


@kernel()
def _descend(weight: torch.Tensor, gradient: torch.Tensor, moment: torch.Tensor | None, scale: torch.Tensor,
             skip: torch.Tensor, rate: torch.Tensor, momentum: float, decay: float, nesterov: bool) -> None:
    """Update one parameter; the rate is a scalar on the host, so that no change of it compiles again."""
    direction = gradient / scale + decay * weight
    if moment is not None:
        summed = momentum * moment + direction
        direction = direction + momentum * summed if nesterov else summed
        moment.copy_(torch.where(skip, moment, summed))
    weight.copy_(torch.where(skip, weight, weight - rate * direction))
