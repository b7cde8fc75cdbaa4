"""Shampoo: a preconditioner for each side of a matrix."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

from tidewheel_optimizers.matrices import MatrixRule, OfMatrices, by_one_rank, moment


class Rule(MatrixRule):
    """Algorithm 1 of https://arxiv.org/abs/1802.09568 for matrices, with the averages and the grafting of
    https://arxiv.org/abs/2309.06497 (sections 2.4 and 4).

        L <- b3 L + (1 - b3) G G^T;   R <- b3 R + (1 - b3) G^T G;   M <- b1 M + (1 - b1) G
        U = L^(-1/4) M R^(-1/4), with the length of Adam's update
    """

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor],
               group: dict[str, Any], number: int) -> torch.Tensor:
        (beta1, beta2), decay, step = group["betas"], group["side_decay"], int(state["step"])
        state["left"].lerp_(gradient @ gradient.T, 1 - decay)
        state["right"].lerp_(gradient.T @ gradient, 1 - decay)
        averaged = moment(state["exp_avg"], gradient, beta1) / (1 - beta1**step)
        square = moment(state["exp_avg_sq"], gradient.square(), beta2) / (1 - beta2**step)
        if step == 1 or step % group["every"] == 0:
            correction = 1 - decay**step
            roots = (state["left_root"], state["right_root"])
            by_one_rank(parameter, number, roots, lambda: [
                inverse_root(state[side] / correction, group["damping"]) for side in self.SIDES])
        update = state["left_root"] @ averaged @ state["right_root"]
        adam = averaged / (square.sqrt() + group["eps"])
        return update * (adam.norm() / update.norm().clamp(min=1e-30))


def inverse_root(matrix: torch.Tensor, damping: float) -> torch.Tensor:
    """Return (matrix + damping * its largest eigenvalue)^(-1/4) of a symmetric matrix, computed in fp64."""
    values, vectors = torch.linalg.eigh(matrix.double())
    values = values.clamp(min=0) + damping * values[-1].clamp(min=1e-30)
    return ((vectors * values**-0.25) @ vectors.T).to(matrix.dtype)


class Shampoo(OfMatrices):
    """Shampoo for the matrices of blocks, AdamW for the rest."""

    RULE = Rule
    LIKE_SIDES = ("", "_root")

    side_decay: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the two preconditioners."""
    every: int = Field(default=10, ge=1)
    """Updates between two computations of their roots."""
    damping: float = Field(default=1e-6, gt=0)
    """Share of the largest eigenvalue that is added to all."""

    def rule_settings(self) -> dict[str, Any]:
        return {**super().rule_settings(), "side_decay": self.side_decay, "every": self.every,
                "damping": self.damping}
