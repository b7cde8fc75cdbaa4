"""LAMB: Adam whose step of each tensor is as long as the tensor's norm."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

import tidewheel as tw
from tidewheel_optimizers import Decay
from tidewheel_optimizers.sharded import local, square_norms


class LAMB(tw.Optimizer):
    """LAMB (https://arxiv.org/abs/1904.00962, algorithm 2), for very large batches."""

    STATE = ("step", "exp_avg", "exp_avg_sq")
    NOT_REPRODUCIBLE = "scales each tensor by its norm, which it adds up over workers"
    NOT_OVERLAPPED = "adds up the norms of tensors over workers in an update"

    learning_rate: float = Field(default=1e-2, gt=0)
    """Peak learning rate, relative to the norm of each tensor."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decays of the first and second moment."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the square root of the second moment."""

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return Rule(groups, self.learning_rate, self.betas, self.epsilon)


class Rule(torch.optim.Optimizer):
    """The update r = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p; p <- p - lr |p| / |r| r.

    The ratio is 1 for a tensor or an update whose norm is 0.

    Args:
        groups: parameter groups.
        lr: learning rate.
        betas: decays of the moments.
        eps: added to the root.
    """

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            if held:
                self._update(group, held)

    def _update(self, group: dict[str, Any], held: list[torch.Tensor]) -> None:
        states, (beta1, beta2) = [self.state[parameter] for parameter in held], group["betas"]
        weights, gradients = [local(p) for p in held], [local(p.grad) for p in held]
        moments = [local(state["exp_avg"]) for state in states]
        squares = [local(state["exp_avg_sq"]) for state in states]
        torch._foreach_add_([state["step"] for state in states], 1.0)
        step = float(states[0]["step"])
        torch._foreach_lerp_(moments, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, (1 - beta2**step) ** 0.5)
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(moments, 1 - beta1**step)
        torch._foreach_div_(updates, roots)
        torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        norms, lengths = (square_norms(tensors, held).sqrt() for tensors in (weights, updates))
        ratios = torch.where((norms > 0) & (lengths > 0), norms / lengths, torch.ones_like(norms))
        torch._foreach_mul_(updates, list(ratios.unbind()))
        torch._foreach_add_(weights, updates, alpha=-group["lr"])
