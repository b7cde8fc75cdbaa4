"""Sophia-G: the momentum divided by an estimate of the curvature, and clipped."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

import tidewheel as tw
from tidewheel_optimizers import Decay
from tidewheel_optimizers.sharded import local


class SophiaG(tw.Optimizer):
    """Sophia with the Gauss-Newton-Bartlett estimator (https://arxiv.org/abs/2305.14342, algorithm 3).

    Every `every` steps the batch is passed once more, with labels that the model draws.
    """

    STATE = ("exp_avg", "curvature")
    NOT_REPRODUCIBLE = ""
    NOT_OVERLAPPED = ""

    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate: the largest movement of an element in one step."""
    betas: tuple[Decay, Decay] = (0.965, 0.99)
    """Decays of the momentum and of the curvature."""
    rho: float = Field(default=0.05, gt=0)
    """Factor of the curvature; elements whose momentum is above rho times it move by the learning rate."""
    epsilon: float = Field(default=1e-12, gt=0)
    """Least divisor."""
    every: int = Field(default=10, ge=1)
    """Steps between two estimates of the curvature."""

    @property
    def curvature_every(self) -> int:
        return self.every

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return Rule(groups, self.learning_rate, self.betas, self.rho, self.epsilon)


class Rule(torch.optim.Optimizer):
    """The update, element-wise.

        m <- b1 m + (1 - b1) g;   p <- p - lr weight_decay p - lr clip(m / max(rho h, eps), 1)
        h <- b2 h + (1 - b2) G^2 / T   for the sum G of the gradients of T drawn labels

    Args:
        groups: parameter groups.
        lr: learning rate.
        betas: (b1, b2).
        rho: factor of the curvature.
        eps: least divisor.
    """

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float], rho: float, eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "rho": rho, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def take_curvature(self, targets: float) -> None:
        """Estimate the curvature from the gradients of drawn labels.

        Args:
            targets: number of labels whose gradients were added up.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient, held = local(parameter.grad), local(self.state[parameter]["curvature"])
                    held.lerp_(gradient.square() / targets, 1 - group["betas"][1])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                weights, state = local(parameter), self.state[parameter]
                momentum, curvature = local(state["exp_avg"]), local(state["curvature"])
                momentum.lerp_(local(parameter.grad), 1 - group["betas"][0])
                weights.mul_(1 - group["lr"] * group["weight_decay"])
                move = momentum / (group["rho"] * curvature).clamp_(min=group["eps"])
                weights.sub_(move.clamp_(-1, 1), alpha=group["lr"])
