"""The base of objectives that learn from preference pairs. It does not import torch before training.

Rows of a micro-batch come in pairs [chosen 0, rejected 0, chosen 1, rejected 1, ...], so one forward pass computes both
answers. A term is a pair: sums are over pairs, and training divides once by the pairs of the global batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from tidewheel.shards.manifest import PARTS, PREFERENCES
from tidewheel.train.objective import Dimension, Objective, Sums
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch

    from tidewheel.train.step import MicroBatch

REWARDS = ("rewards_chosen", "rewards_rejected", "margins", "accuracies")
"""Metrics of every objective of pairs: the two rewards, their difference, and how often it is positive."""
LOG_PROBABILITIES = Version("log_probabilities")
"""Version of `preferences.log_probabilities`."""


class PairObjective(Objective):
    """Base of objectives of pairs."""

    READS = PREFERENCES
    METRICS: ClassVar[tuple[str, ...]] = REWARDS
    WORKS_WITH: ClassVar[tuple[Dimension, ...]] = ("tensor", "pipeline")
    UNDECISIVE = ("chunk_tokens",)

    chunk_tokens: int = Field(default=1024, ge=0)
    """Tokens whose logits are in memory at once. Logits of several chunks are computed again in the backward pass. 0:
    all tokens at once."""

    @property
    def parts(self) -> int:
        return PARTS

    @property
    def logit_tokens(self) -> int | None:
        return self.chunk_tokens

    def count(self, batch: MicroBatch) -> int:
        """Return the number of pairs."""
        return len(batch.tokens) // batch.parts

    def pair_sums(self, losses: torch.Tensor, chosen: torch.Tensor, rejected: torch.Tensor, beta: float = 1.0,
                  **metrics: torch.Tensor) -> Sums:
        """Return the sums of a micro-batch of P pairs.

        Args:
            losses: of the pairs, fp32 [P], or their sum.
            chosen: rewards of the chosen answers in units of `beta`, fp32 [P].
            rejected: the same of the rejected answers.
            beta: factor of the rewards.
            metrics: sums of further metrics than `REWARDS`.
        """
        margins = beta * (chosen - rejected)
        return Sums(losses.sum(), {"rewards_chosen": beta * chosen.sum(), "rewards_rejected": beta * rejected.sum(),
                                   "margins": margins.sum(), "accuracies": (margins > 0).sum(), **metrics})


class ReferenceObjective(PairObjective):
    """Base of objectives that compare the model with a reference model, whose log-probabilities are in the data."""

    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull towards the reference model: rewards are beta x log(p / p of the reference)."""
    start_is_reference: bool = True
    """Refuse log-probabilities (`data.reference`) of another model than the one that training starts from."""

    @property
    def needs_reference(self) -> bool:
        return True
