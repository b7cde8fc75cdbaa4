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
    """KTO (https://arxiv.org/abs/2402.01306) of single answers with a label, or of the two answers of each pair.

    Of a pair the chosen answer is desirable, and the loss is the mean over both. Of single answers a term is a row:
    `rewards_chosen` is the sum over desirable ones over the number of all rows, and `accuracies` is how often a
    desirable answer has a positive reward, or another a negative one.

    The KL estimate is the mean log-ratio of mismatched answers over the global batch, clamped at 0. They are computed
    before any gradient, so neither the number of workers nor `batch.micro_sequences` changes it. A mismatched answer is
    that of the row before in the same shard, so its reference log-probability is part of the data. TRL takes the answer
    before in the order of its data set, and the mean over one micro-batch of all ranks: with one micro-batch a rank
    both are the same.
    """

    VERSION = Version("objective_kto", 2, uses=(LOG_PROBABILITIES,))
    METRICS = (*REWARDS, "kl")
    TAKES_UNPAIRED = True

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
        import torch

        from tidewheel.train.preferences.log_probabilities import answers

        assert batch.reference is not None, "checked before training"
        ratios = answers(outputs, batch, self.chunk_tokens).sums - batch.reference
        kl = ratios.new_zeros(()) if batch.whole is None else batch.whole.clamp(min=0)
        if batch.desirable is None:
            desirable = (torch.arange(2, device=ratios.device) == 0)[None]
        else:
            desirable = batch.desirable[:, None]
        rewards = self.beta * ratios
        gains = torch.where(desirable, rewards - self.beta * kl, self.beta * kl - rewards)
        weights = torch.where(desirable, self.desirable_weight, self.undesirable_weight)
        loss = (weights * (1 - gains.sigmoid())).sum() / batch.parts
        chosen, rejected = (rewards * desirable).sum(), (rewards * ~desirable).sum()
        right = torch.where(desirable, rewards > 0, rewards < 0)
        if batch.desirable is None:
            right = rewards[:, :1] > rewards[:, 1:]
        return Sums(loss, {"rewards_chosen": chosen, "rewards_rejected": rejected, "margins": chosen - rejected,
                           "accuracies": right.sum(), "kl": kl * len(ratios)})
