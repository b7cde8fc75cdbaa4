"""Contrastive preference optimisation: DPO without a reference model, with a cross-entropy of the chosen answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pydantic
from pydantic import Field

from tidewheel.train.objective import Outputs, Sums
from tidewheel.train.preferences.objective import LOG_PROBABILITIES, REWARDS, PairObjective
from tidewheel.versions import Version

if TYPE_CHECKING:
    from tidewheel.train.step import MicroBatch


class CPO(PairObjective):
    """CPO (https://arxiv.org/abs/2401.08417), in nats per pair."""

    VERSION = Version("objective_cpo", uses=(LOG_PROBABILITIES,))
    METRICS = (*REWARDS, "nll")

    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """Loss of the difference of log-probabilities; ipo takes them per token."""
    beta: float = Field(default=0.1, gt=0)
    """Factor of the difference."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a pair is labelled the wrong way round, for sigmoid."""
    sft_weight: float = Field(default=1.0, ge=0)
    """Weight of the cross-entropy of the chosen answer: its mean over the answer's tokens, then over pairs."""

    @pydantic.model_validator(mode="after")
    def _possible(self) -> CPO:
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(f"label_smoothing has no effect on {self.loss}; nearest legal choice: loss sigmoid")
        return self

    def sums(self, outputs: Outputs, batch: MicroBatch) -> Sums:
        import torch.nn.functional as F

        from tidewheel.train.preferences.log_probabilities import answers
        from tidewheel.train.preferences.losses import smoothed

        policy = answers(outputs, batch, self.chunk_tokens)
        chosen, rejected = (policy.means if self.loss == "ipo" else policy.sums).unbind(dim=1)
        margins = self.beta * (chosen - rejected)
        if self.loss == "sigmoid":
            losses = smoothed(margins, self.label_smoothing)
        elif self.loss == "hinge":
            losses = F.relu(1 - margins)
        else:
            losses = (chosen - rejected - 1 / (2 * self.beta)) ** 2
        nll = -policy.means[:, 0].sum()
        return self.pair_sums(losses.sum() + self.sft_weight * nll, chosen, rejected, self.beta, nll=nll)
