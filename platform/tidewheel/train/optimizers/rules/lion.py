"""Lion: the update is the sign of an interpolation of momentum and gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of https://arxiv.org/abs/2302.06675, with foreach operations over the parameters of a group.

        p <- p - lr (sign(b1 m + (1 - b1) g) + weight_decay p);   m <- b2 m + (1 - b2) g

    It is element-wise, so each rank updates its part of a sharded parameter.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: (b1, b2).
        weight_decay: times the learning rate.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99),
                 weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

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
            weights, gradients = [_local(p) for p in held], [_local(p.grad) for p in held]
            moments = [_local(self.state[parameter]["exp_avg"]) for parameter in held]
            rate, (beta1, beta2) = group["lr"], group["betas"]
            updates = torch._foreach_lerp(moments, gradients, 1.0 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(weights, 1.0 - rate * group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=-rate)
            torch._foreach_lerp_(moments, gradients, 1.0 - beta2)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
