"""AdamW of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from tidewheel.train.optim.base import Optimizer, moment_decays, on_cuda
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch


class AdamW(Optimizer):
    """AdamW (https://arxiv.org/abs/1711.05101), `torch.optim.AdamW`, fused on CUDA."""

    VERSION = Version("optimizer_adamw", uses=(Optimizer.VERSION,))
    STATE = ("step", "exp_avg", "exp_avg_sq")
    NOT_REPRODUCIBLE = ""
    NOT_OVERLAPPED = ""
    HOST_TRAFFIC = 28.0  # torch's fused kernel reads parameter, gradient and moments, and writes all but the gradient

    learning_rate: float = Field(default=3e-3, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decays of the first and second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the square root of the second moment."""

    _betas = field_validator("betas")(moment_decays)

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        import torch

        from tidewheel.train.optimizers.rules import host_adam

        if host_adam.is_offloaded(groups):
            return host_adam.HostAdamW(groups, lr=self.learning_rate, betas=self.betas, eps=self.epsilon, foreach=False)
        # CPUs use the foreach variant. Their fused kernel rounds the tail of a vector differently from its body, so
        # results would depend on how parameters are sharded.
        fused = on_cuda(groups)
        return torch.optim.AdamW(groups, lr=self.learning_rate, betas=self.betas, eps=self.epsilon, foreach=not fused,
                                 fused=fused)
