"""Next-token cross-entropy, the objective of pretraining."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidewheel.models.config import TOKEN_LOSS, LossConfig
from tidewheel.train.objective import DIMENSIONS, Bound, Objective
from tidewheel.versions import Version

if TYPE_CHECKING:
    from tidewheel.train.step import MicroBatch


class NextToken(LossConfig, Objective):
    """Next-token cross-entropy, in nats per token.

    The decoder computes it without whole logits: in chunks, and under tensor parallelism with each rank's shard of the
    vocabulary.
    """

    VERSION = Version("objective_next_token", uses=(TOKEN_LOSS,))
    WORKS_WITH = DIMENSIONS
    UNDECISIVE = ("chunk_tokens",)

    def token_loss(self) -> LossConfig:
        return self

    @property
    def logit_tokens(self) -> int | None:
        return self.chunk_tokens

    def bound(self, batch: MicroBatch) -> Bound | None:
        return None
