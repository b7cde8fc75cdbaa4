"""AdEMAMix: AdamW with a second, slow moment of the gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from tidewheel.train.optim.base import Optimizer, on_cuda
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch


class AdEMAMix(Optimizer):
    """AdEMAMix (https://arxiv.org/abs/2409.03137): old gradients still help, through a slow moving average."""

    VERSION = Version("optimizer_ademamix", uses=(Optimizer.VERSION,))
    STATE = ("step", "exp_avg", "exp_avg_slow", "exp_avg_sq")
    NOT_REPRODUCIBLE = ""
    NOT_OVERLAPPED = ""

    learning_rate: float = Field(default=3e-3, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float, float] = (0.9, 0.999, 0.9999)
    """Decays of the first and second moment, and of the slow one."""
    alpha: float = Field(default=5.0, ge=0)
    """Weight of the slow moment in the update."""
    alpha_steps: int = Field(default=0, ge=0)
    """Updates over which `alpha` grows from 0 and the slow decay from the fast one, so that early updates are stable:
    the paper takes the steps of the run. 0: both are constant."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the square root of the second moment."""

    @field_validator("betas")
    @classmethod
    def _betas(cls, betas: tuple[float, float, float]) -> tuple[float, float, float]:
        if not all(0 < beta < 1 for beta in betas):
            raise ValueError("betas must be between 0 and 1")
        return betas

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        from tidewheel.train.optimizers.rules import ademamix

        return ademamix.AdEMAMix(groups, lr=self.learning_rate, betas=self.betas, alpha=self.alpha,
                                 alpha_steps=self.alpha_steps, eps=self.epsilon, fused=on_cuda(groups))
