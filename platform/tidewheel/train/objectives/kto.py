"""Kahneman-Tversky optimisation: each answer is judged by itself, as desirable or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tidewheel.shards.manifest import PARTS, WITH_MISMATCHED
from tidewheel.train.objective import Outputs, Sums
from tidewheel.train.preferences.objective import LOG_PROBABILITIES, REWARDS, ReferenceObjective
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch

    from tidewheel.train.step import MicroBatch


class KTO(ReferenceObjective):
    """KTO (https://arxiv.org/abs/2402.01306) of the two answers of each pair: the chosen one is desirable.

    The loss of a pair is the mean over its two answers. The KL estimate is the mean log-ratio of mismatched answers
    over the pairs of the global batch, clamped at 0. They are computed before any gradient, so neither the number of
    workers nor `batch.micro_sequences` changes it. A mismatched answer is that of the row before in the same shard, so
    its reference log-probability is part of the data. TRL takes the answer before in the order of its data set, and the
    mean over one micro-batch of all ranks: with one micro-batch a rank both are the same.
    """

    VERSION = Version("objective_kto", uses=(LOG_PROBABILITIES,))
    METRICS = (*REWARDS, "kl")

    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto: compare with the KL estimate. apo_zero_unpaired: compare with 0, without mismatched answers."""
    desirable_weight: float = Field(default=1.0, gt=0)
    """Factor of the losses of chosen answers."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """Factor of the losses of rejected answers."""

    @property
    def parts(self) -> int:
        return WITH_MISMATCHED if self.loss == "kto" else PARTS

    @property
    def looks_first(self) -> bool:
        return self.loss == "kto"

    def first(self, outputs: Outputs, batch: MicroBatch) -> torch.Tensor:
        from tidewheel.train.preferences.log_probabilities import answers

        assert batch.reference is not None, "checked before training"
        return (answers(outputs, batch, self.chunk_tokens).sums - batch.reference).sum()

    def sums(self, outputs: Outputs, batch: MicroBatch) -> Sums:
        import torch.nn.functional as F

        from tidewheel.train.preferences.log_probabilities import answers

        assert batch.reference is not None, "checked before training"
        ratios = answers(outputs, batch, self.chunk_tokens).sums - batch.reference
        chosen, rejected = ratios.unbind(dim=1)
        kl = ratios.new_zeros(()) if batch.whole is None else batch.whole.clamp(min=0)
        desirable = 1 - F.sigmoid(self.beta * (chosen - kl))
        undesirable = 1 - F.sigmoid(self.beta * (kl - rejected))
        loss = (self.desirable_weight * desirable + self.undesirable_weight * undesirable).sum() / 2
        margins = self.beta * (chosen - rejected)
        return Sums(loss, {"rewards_chosen": self.beta * chosen.sum(), "rewards_rejected": self.beta * rejected.sum(),
                           "margins": margins.sum(), "accuracies": (margins > 0).sum(), "kl": kl * len(chosen)})
