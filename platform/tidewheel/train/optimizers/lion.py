"""Lion, whose update is the sign of an interpolation of momentum and gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from tidewheel.train.optim.base import Optimizer, moment_decays, on_cuda
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch


class Lion(Optimizer):
    """Lion (https://arxiv.org/abs/2302.06675).

    The update is a sign, so the learning rate is a tenth of AdamW's and the weight decay ten times AdamW's (section 5).
    """

    VERSION = Version("optimizer_lion", uses=(Optimizer.VERSION,))
    STATE = ("exp_avg",)
    NOT_REPRODUCIBLE = ""
    NOT_OVERLAPPED = ""

    learning_rate: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Share of the moment in the update, and decay of the moment."""
    weight_decay: float = Field(default=1.0, ge=0)
    """Weight decay of matrices, times the learning rate."""

    _betas = field_validator("betas")(moment_decays)

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        from tidewheel.train.optimizers.rules import lion

        return lion.Lion(groups, lr=self.learning_rate, betas=self.betas, fused=on_cuda(groups))
