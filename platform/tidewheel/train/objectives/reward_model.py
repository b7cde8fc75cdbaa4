"""Reward models: a decoder whose output is one number, trained on pairs with the Bradley-Terry likelihood."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pydantic
from pydantic import Field

from tidewheel.train.objective import Outputs, Sums
from tidewheel.train.preferences.objective import PairObjective
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch

    from tidewheel.train.step import MicroBatch


class RewardModel(PairObjective):
    """-log sigmoid(reward of the chosen sequence - reward of the rejected one - margin), in nats per pair.

    On answers with labels of their steps (`read.step_labels` of the pipeline): the cross-entropy of a step's label with
    the sigmoid of the head's value at its end, in nats per step (https://arxiv.org/abs/2305.20050, appendix F).
    """

    VERSION = Version("objective_reward_model")
    WORKS_WITH = ("pipeline",)  # one output cannot be cut over tensor ranks
    HEAD = 1

    head: Literal["outcome", "process"] = "outcome"
    """outcome: the reward is the head's value at the last token. process: the mean of its values at the ends of steps,
    which are the last token and every token `step_token` of the answer."""
    step_token: int | None = Field(default=None, ge=0)
    """Token id that ends a step of an answer, for a process head."""
    margin: float = 0.0
    """Difference that the rewards are to have (Llama 2, https://arxiv.org/abs/2307.09288 equation 2). Margins of the
    pairs (`read.margin` of the pipeline) are added to it."""
    center: float = Field(default=0.0, ge=0)
    """Weight of the squared sum of the two rewards, which keeps rewards near 0 (https://arxiv.org/abs/2312.09244)."""

    @pydantic.model_validator(mode="after")
    def _possible(self) -> RewardModel:
        if (self.step_token is not None) != (self.head == "process"):
            raise ValueError("step_token says where steps end, for head process and only for it; nearest legal choice: "
                             "head outcome without step_token")
        return self

    @property
    def head_kind(self) -> str:
        return self.head

    @classmethod
    def settings_of_head(cls, kind: str) -> dict[str, str] | None:
        return {"head": kind}

    @property
    def takes_steps(self) -> bool:
        return self.head == "process"

    def count(self, batch: MicroBatch) -> int:
        """Return the number of pairs, or of labelled steps."""
        return super().count(batch) if batch.step_labels is None else batch.num_steps

    def sums(self, outputs: Outputs, batch: MicroBatch) -> Sums:
        import torch.nn.functional as F

        if batch.step_labels is not None:
            return self._of_steps(outputs.logits()[..., 0].float(), batch.step_labels)
        rewards = self.rewards(outputs, batch).view(-1, batch.parts)
        chosen, rejected = rewards.unbind(dim=1)
        margins = self.margin if batch.margins is None else self.margin + batch.margins
        losses = -F.logsigmoid(chosen - rejected - margins)
        if self.center:
            losses = losses + self.center * (chosen + rejected) ** 2
        return self.pair_sums(losses, chosen, rejected)

    def _of_steps(self, values: torch.Tensor, labels: torch.Tensor) -> Sums:
        import torch.nn.functional as F

        known, right = labels >= 0, labels == 1
        losses = F.binary_cross_entropy_with_logits(values, right.float(), reduction="none")
        of_right, of_wrong = (values * right).sum(), (values * (known & ~right)).sum()
        hits = ((values > 0) == right) & known
        return Sums((losses * known).sum(), {"rewards_chosen": of_right, "rewards_rejected": of_wrong,
                                             "margins": of_right - of_wrong, "accuracies": hits.sum()})

    def rewards(self, outputs: Outputs, batch: MicroBatch) -> torch.Tensor:
        values = outputs.logits()[..., 0].float()
        rows = batch.segment_ids >= 0
        last = rows.sum(dim=1, keepdim=True) - 1
        if self.head == "outcome":
            return values.gather(1, last)[:, 0]
        in_answer = batch.targets.roll(1, dims=1) >= 0  # the token is one that the model would learn to predict
        ends = (batch.tokens == self.step_token) & in_answer & rows
        ends = ends.scatter(1, last, True)
        return (values * ends).sum(dim=1) / ends.sum(dim=1)
