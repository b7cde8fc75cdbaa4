"""Direct preference optimisation and its relatives: losses of pairs against a reference model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pydantic
from pydantic import Field

from tidewheel.train.objective import Outputs, Sums
from tidewheel.train.preferences.objective import LOG_PROBABILITIES, REWARDS, ReferenceObjective
from tidewheel.versions import Version

if TYPE_CHECKING:
    from tidewheel.train.step import MicroBatch

SMOOTHED = ("sigmoid", "robust", "exo_pair")
"""Losses that use `label_smoothing`."""


class DPO(ReferenceObjective):
    """A loss of pairs against a reference model, in nats per pair; `preferences/losses.py` has the formulas.

    The log-probabilities of the reference model come with the data (`data.reference`).
    """

    VERSION = Version("objective_dpo", uses=(LOG_PROBABILITIES,))
    METRICS = (*REWARDS, "logps_chosen", "logps_rejected")

    loss: Literal["sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "sigmoid_norm", "apo_zero", "apo_down",
                  "discopop", "bco_pair", "sppo_hard"] = "sigmoid"
    """Which loss; sigmoid is DPO itself."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a pair is labelled the wrong way round, for sigmoid (conservative DPO), robust and exo_pair."""
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """f-divergence to the reference model (https://arxiv.org/abs/2309.16240), for losses of DPO's difference: sigmoid,
    hinge, ipo, robust, exo_pair, sigmoid_norm, discopop."""
    alpha: float = Field(default=0.5, gt=0)
    """Of the alpha divergence, not 1."""
    temperature: float = Field(default=0.05, gt=0)
    """Of discopop."""
    sft_weight: float = Field(default=0.0, ge=0)
    """Add this times the cross-entropy of the chosen answer: its mean over the answer's tokens, then over pairs."""

    @pydantic.model_validator(mode="after")
    def _possible(self) -> DPO:
        if self.loss == "exo_pair" and not self.label_smoothing:
            raise ValueError("exo_pair with label_smoothing 0 has log(0); nearest legal choice: label_smoothing 1e-3")
        if self.label_smoothing and self.loss not in SMOOTHED:
            raise ValueError(f"label_smoothing {self.label_smoothing:g} has no effect on {self.loss}; it works with "
                             f"{', '.join(SMOOTHED)}; leave it out")
        if self.alpha == 1:
            raise ValueError("alpha 1 is the reverse KL divergence; nearest legal choice: divergence reverse_kl")
        return self

    def sums(self, outputs: Outputs, batch: MicroBatch) -> Sums:
        from tidewheel.train.preferences import losses
        from tidewheel.train.preferences.log_probabilities import answers

        assert batch.reference is not None, "checked before training"
        policy = answers(outputs, batch, self.chunk_tokens)
        chosen, rejected = (policy.sums - batch.reference)[:, :2].unbind(dim=1)
        ratios = losses.Ratios(chosen, rejected, policy.tokens[:, 0], policy.tokens[:, 1], self.beta,
                               self.label_smoothing, self.temperature, losses.divergence(self.divergence, self.alpha))
        loss = losses.WITH_REFERENCE[self.loss](ratios).sum()
        if self.sft_weight:
            loss = loss - self.sft_weight * policy.means[:, 0].sum()
        logps_chosen, logps_rejected = policy.sums[:, :2].sum(dim=0)
        return self.pair_sums(loss, chosen, rejected, self.beta, logps_chosen=logps_chosen,
                              logps_rejected=logps_rejected)
