"""Soft adaptive policy optimisation: a sigmoid gate in the place of clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from tidewheel.train.policy.objective import SURROGATE, PolicyObjective
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch


class SAPO(PolicyObjective):
    """SAPO (https://arxiv.org/abs/2511.20347). The bounds of the ratio only count how many tokens are far off."""

    VERSION = Version("objective_sapo", uses=(SURROGATE,))

    positive: float = Field(default=1.0, gt=0)
    """Temperature of the gate of tokens with a positive advantage."""
    negative: float = Field(default=1.05, gt=0)
    """Of the others."""

    def surrogate(self, log_ratio: torch.Tensor, log_p: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        from tidewheel.train.policy.surrogates import soft

        return soft(log_ratio, advantages, self.positive, self.negative)
