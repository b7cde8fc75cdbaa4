"""Lion: the update is the sign of an interpolation of momentum and gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tidewheel.train.optimizers.rules.on_device import kernel, local, scale_and_skip


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of https://arxiv.org/abs/2302.06675, with foreach operations over the parameters of a group.

        p <- p - lr (sign(b1 m + (1 - b1) g) + weight_decay p);   m <- b2 m + (1 - b2) g

    It is element-wise, so each rank updates its part of a sharded parameter.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: (b1, b2).
        weight_decay: times the learning rate.
        fused: update each parameter with one kernel, see `on_device`.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99),
                 weight_decay: float = 0.0, fused: bool = False) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self._step_supports_amp_scaling = fused

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not held:
                continue
            for parameter in held:
                if not self.state[parameter]:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
            weights, gradients = [local(p) for p in held], [local(p.grad) for p in held]
            moments = [local(self.state[parameter]["exp_avg"]) for parameter in held]
            if self._step_supports_amp_scaling:
                self._update(group, weights, gradients, moments)
                continue
            rate, (beta1, beta2) = group["lr"], group["betas"]
            updates = torch._foreach_lerp(moments, gradients, 1.0 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(weights, 1.0 - rate * group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=-rate)
            torch._foreach_lerp_(moments, gradients, 1.0 - beta2)

    def _update(self, group: dict[str, Any], weights: list[torch.Tensor], gradients: list[torch.Tensor],
                moments: list[torch.Tensor]) -> None:
        scale, skip = scale_and_skip(self, weights[0].device)
        rate = torch.tensor(group["lr"], dtype=torch.float32)
        decay = torch.tensor(group["lr"] * group["weight_decay"], dtype=torch.float32)
        for weight, gradient, moment in zip(weights, gradients, moments):
            _lion(weight, gradient, moment, scale, skip, rate, decay, *group["betas"])


@kernel()
def _lion(weight: torch.Tensor, gradient: torch.Tensor, moment: torch.Tensor, scale: torch.Tensor, skip: torch.Tensor,
          rate: torch.Tensor, decay: torch.Tensor, beta1: float, beta2: float) -> None:
    """Update one parameter; the rates are scalars on the host, so that no change of theirs compiles again."""
    gradient = gradient / scale
    updated = weight * (1.0 - decay) - rate * moment.lerp(gradient, 1.0 - beta1).sign()
    weight.copy_(torch.where(skip, weight, updated))
    moment.copy_(torch.where(skip, moment, moment.lerp(gradient, 1.0 - beta2)))
