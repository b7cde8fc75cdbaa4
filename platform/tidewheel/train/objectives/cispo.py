"""CISPO: the ratio is truncated instead of the gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tidewheel.train.policy.objective import SURROGATE, PolicyObjective
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch


class CISPO(PolicyObjective):
    """CISPO (https://arxiv.org/abs/2506.13585): the ratio is a weight without a gradient, truncated at
    1 + `epsilon_high`, so that no token loses its gradient; a mean over all tokens of the step."""

    VERSION = Version("objective_cispo", uses=(SURROGATE,))

    average: Literal["sequences", "tokens", "constant"] = "tokens"
    epsilon_high: float = Field(default=4.0, gt=0)

    def surrogate(self, log_ratio: torch.Tensor, log_p: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        from tidewheel.train.policy.surrogates import truncated

        return truncated(log_ratio, log_p, advantages, 1 + self.epsilon_high)
