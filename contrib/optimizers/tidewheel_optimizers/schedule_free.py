"""AdamW without a schedule: an average of the iterates takes the place of the decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field

import tidewheel as tw
from tidewheel_optimizers import Decay
from tidewheel_optimizers.sharded import local


class ScheduleFree(tw.Optimizer):
    """Schedule-free AdamW (https://arxiv.org/abs/2405.15682). Use it with `schedule: constant` and a warm-up.

    The parameters are the points y where the gradient is taken. The average x is what the paper evaluates: each
    evaluation has the loss of both, and `tidewheel checkpoint export --average schedulefree` writes x.
    """

    STATE = ("step", "z", "x", "exp_avg_sq", "weights")
    AVERAGE = "x"
    NOT_REPRODUCIBLE = ""
    NOT_OVERLAPPED = ""

    learning_rate: float = Field(default=3e-3, gt=0)
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Share of the average in the parameters, and decay of the second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the square root of the second moment."""

    def build_all(self, named: Sequence[tuple[str, torch.Tensor]]) -> list[torch.optim.Optimizer]:
        optimizers = super().build_all(named)
        for optimizer in optimizers:
            for state in optimizer.state.values():
                state["weights"] = torch.zeros(())  # the sum of squared rates, one number
        return optimizers

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return Rule(groups, self.learning_rate, self.betas, self.epsilon)

    def state_bytes(self, parameters: int, block_matrices: int) -> float:
        return 12.0 * parameters


class Rule(torch.optim.Optimizer):
    """Algorithm 1 of the paper, element-wise, with a bias correction of the second moment.

        v <- b2 v + (1 - b2) g^2;   z <- z - lr (g / (sqrt(v / (1 - b2^t)) + eps) + weight_decay y)
        c = lr^2 / (sum of lr^2);   x <- (1 - c) x + c z;   y = (1 - b1) z + b1 x

    Args:
        groups: parameter groups.
        lr: learning rate.
        betas: (b1, b2).
        eps: added to the root.
    """

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            (beta1, beta2), rate = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                y, gradient = local(parameter), local(parameter.grad)
                z, x, square = (local(state[name]) for name in ("z", "x", "exp_avg_sq"))
                if not state["step"]:
                    z.copy_(y)
                    x.copy_(y)
                state["step"] += 1
                state["weights"] += rate**2
                square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                root = (square / (1 - beta2 ** float(state["step"]))).sqrt_().add_(group["eps"])
                z.sub_(gradient / root + group["weight_decay"] * y, alpha=rate)
                weights = float(state["weights"])
                x.lerp_(z, rate**2 / weights if weights else 0.0)
                y.copy_(z.lerp(x, beta1))
