"""Simple preference optimisation: the mean log-probability of an answer is its reward, without a reference model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from tidewheel.train.objective import Outputs, Sums
from tidewheel.train.preferences.objective import LOG_PROBABILITIES, REWARDS, PairObjective
from tidewheel.versions import Version

if TYPE_CHECKING:
    from tidewheel.train.step import MicroBatch


class SimPO(PairObjective):
    """SimPO (https://arxiv.org/abs/2405.14734), in nats per pair."""

    VERSION = Version("objective_simpo", uses=(LOG_PROBABILITIES,))
    METRICS = (*REWARDS, "nll")

    beta: float = Field(default=2.0, gt=0)
    """Factor of the mean log-probabilities; the paper uses 2.0 to 2.5."""
    gamma: float = Field(default=1.0, ge=0)
    """Margin that the chosen answer's reward is to have; the paper uses 0.3 to 1.6."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a pair is labelled the wrong way round."""
    sft_weight: float = Field(default=0.0, ge=0)
    """Weight of the cross-entropy of the chosen answer (CPO-SimPO): a mean over its tokens, then over pairs."""

    def sums(self, outputs: Outputs, batch: MicroBatch) -> Sums:
        from tidewheel.train.preferences.log_probabilities import answers
        from tidewheel.train.preferences.losses import smoothed

        chosen, rejected = answers(outputs, batch, self.chunk_tokens).means.unbind(dim=1)
        margins = self.beta * (chosen - rejected)
        nll = -chosen.sum()
        loss = smoothed(margins - self.gamma, self.label_smoothing).sum()
        return self.pair_sums(loss + self.sft_weight * nll, chosen, rejected, self.beta, nll=nll)
