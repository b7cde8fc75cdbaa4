"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

from tidewheel_optimizers.matrices import MatrixRule, OfMatrices, by_one_rank, moment


class Rule(MatrixRule):
    """Algorithm 3 of https://arxiv.org/abs/2409.11321.

        G' = Q_L^T G Q_R;   M <- b1 M + (1 - b1) G;   V <- b2 V + (1 - b2) G'^2
        U = Q_L ((Q_L^T M Q_R) / (sqrt(V) + eps)) Q_R^T, with both moments' bias corrected
        L <- b3 L + (1 - b3) G G^T;   R <- b3 R + (1 - b3) G^T G;   every few updates: Q <- QR(L Q)

    The first gradient gives the first bases and no update, as in the paper's own code: in its own basis it is diagonal,
    and Adam would divide the roundings beside the diagonal by themselves.
    """

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor],
               group: dict[str, Any], number: int) -> torch.Tensor | None:
        (beta1, beta2), decay, step = group["betas"], group["side_decay"], int(state["step"]) - 1
        bases = (state["left_basis"], state["right_basis"])
        if step == 0:
            state["left"].copy_(gradient @ gradient.T).mul_(1 - decay)
            state["right"].copy_(gradient.T @ gradient).mul_(1 - decay)
            by_one_rank(parameter, number, bases, lambda: [torch.linalg.eigh(state[side].double())[1].to(gradient.dtype)
                                                           for side in self.SIDES])
            return None
        left, right = bases
        averaged = moment(state["exp_avg"], gradient, beta1)
        rotated = left.T @ gradient @ right
        square = moment(state["exp_avg_sq"], rotated.square(), beta2)
        direction = (left.T @ averaged @ right) / (1 - beta1**step)
        update = left @ (direction / ((square / (1 - beta2**step)).sqrt() + group["eps"])) @ right.T
        state["left"].lerp_(gradient @ gradient.T, 1 - decay)
        state["right"].lerp_(gradient.T @ gradient, 1 - decay)
        if step % group["every"] == 0:
            by_one_rank(parameter, number, bases, lambda: [
                torch.linalg.qr(state[side] @ state[f"{side}_basis"])[0] for side in self.SIDES])
        return update


class SOAP(OfMatrices):
    """SOAP for the matrices of blocks, AdamW for the rest."""

    RULE = Rule
    LIKE_SIDES = ("", "_basis")

    side_decay: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the two preconditioners."""
    every: int = Field(default=10, ge=1)
    """Updates between two refreshes of their eigenvectors."""

    def rule_settings(self) -> dict[str, Any]:
        return {**super().rule_settings(), "side_decay": self.side_decay, "every": self.every}
