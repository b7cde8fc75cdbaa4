"""AdEMAMix: Adam whose update has a second, slow moving average of the gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tidewheel.train.optimizers.rules.on_device import count_update, groups_to_update, kernel, local


class AdEMAMix(torch.optim.Optimizer):
    """Algorithm 1 of https://arxiv.org/abs/2409.03137, element-wise.

        m1 <- b1 m1 + (1 - b1) g;   m2 <- b3(t) m2 + (1 - b3(t)) g;   v <- b2 v + (1 - b2) g^2
        p <- p - lr ((m1 / (1 - b1^t) + alpha(t) m2) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p)

    alpha(t) and b3(t) grow over `alpha_steps` updates (equations 3 and 4). They are computed on the device, where the
    number of updates is, in fp64.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: (b1, b2, b3).
        alpha: weight of m2.
        alpha_steps: updates over which alpha and b3 grow; 0: they are constant.
        eps: added to the root.
        weight_decay: times the learning rate.
        fused: take the gradient's scale and whether to update on the device, see `on_device`.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float, float], alpha: float, alpha_steps: int,
                 eps: float, weight_decay: float = 0.0, fused: bool = False) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "alpha": alpha, "alpha_steps": alpha_steps, "eps": eps,
                                  "weight_decay": weight_decay, "capturable": fused})
        self._step_supports_amp_scaling = fused

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        assert closure is None
        for group, held, scale, skip in groups_to_update(self):
            states = [self.state[parameter] for parameter in held]
            if self._step_supports_amp_scaling:
                count_update([state["step"] for state in states], skip)
            else:
                torch._foreach_add_([state["step"] for state in states], 1.0)
            rate = torch.tensor(group["lr"], dtype=torch.float32)
            decay = torch.tensor(group["lr"] * group["weight_decay"], dtype=torch.float32)
            factors = _factors(states[0]["step"], group).to(scale.device)
            for parameter, state in zip(held, states):
                _update(local(parameter), local(parameter.grad), local(state["exp_avg"]), local(state["exp_avg_slow"]),
                        local(state["exp_avg_sq"]), scale, skip, rate, decay, factors, group["betas"][0],
                        group["betas"][1], group["eps"])


def _factors(step: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Return alpha(t), 1 - b3(t), 1 - b1^t and sqrt(1 - b2^t) at update t, fp32 [4] on the device of `step`."""
    fast, second, slow = group["betas"]
    steps, update = group["alpha_steps"], step.double()
    alpha = torch.full_like(update, group["alpha"])
    beta = torch.full_like(update, slow)
    if steps:
        share = (update / steps).clamp(max=1.0)
        alpha = alpha * share
        # the half-life of the slow moment grows linearly: equation 4
        inverse = (1 - share) / math.log(fast) + share / math.log(slow)
        beta = torch.exp(1 / inverse).clamp(max=slow)
    return torch.stack([alpha, 1 - beta, 1 - fast**update, (1 - second**update).sqrt()]).float()


@kernel()
def _update(weight: torch.Tensor, gradient: torch.Tensor, moment: torch.Tensor, slow: torch.Tensor,
            second: torch.Tensor, scale: torch.Tensor, skip: torch.Tensor, rate: torch.Tensor, decay: torch.Tensor,
            factors: torch.Tensor, beta1: float, beta2: float, epsilon: float) -> None:
    """Update one parameter; the rates are scalars on the host, so that no change of theirs compiles again."""
    gradient = gradient / scale
    alpha, slow_share, first_correction, second_correction = factors.unbind()
    averaged = moment.lerp(gradient, 1 - beta1)
    slowly = slow + slow_share * (gradient - slow)
    squares = second * beta2 + gradient * gradient * (1 - beta2)
    direction = (averaged / first_correction + alpha * slowly) / (squares.sqrt() / second_correction + epsilon)
    weight.copy_(torch.where(skip, weight, weight * (1 - decay) - rate * direction))
    moment.copy_(torch.where(skip, moment, averaged))
    slow.copy_(torch.where(skip, slow, slowly))
    second.copy_(torch.where(skip, second, squares))
