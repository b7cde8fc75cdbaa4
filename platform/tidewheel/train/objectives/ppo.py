"""PPO with a value head: each token has an advantage of its own, against the value that the head gave it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from tidewheel.errors import ConfigError
from tidewheel.train.objective import Dimension, Outputs, Sums
from tidewheel.train.policy.objective import METRICS, SURROGATE, PolicyObjective
from tidewheel.versions import Version

if TYPE_CHECKING:
    from tidewheel.train.step import MicroBatch


class PPO(PolicyObjective):
    """PPO (https://arxiv.org/abs/1707.06347): the clipped loss, and `value_weight` times the value head's.

    The head is a vector on the hidden states of the policy, 0 at first. The generators compute the values with the
    version of the policy that samples, so values and returns are part of a rollout: `rollouts.advantage: gae`. Metrics
    beside those of the policy: half the squared error of the values, the share of tokens whose values are clipped, the
    values, and the returns that they estimate.
    """

    VERSION = Version("objective_ppo", uses=(SURROGATE,))
    METRICS: ClassVar[tuple[str, ...]] = (*METRICS, "value_loss", "value_clipped", "value", "return")
    WORKS_WITH: ClassVar[tuple[Dimension, ...]] = ("pipeline",)  # one output cannot be cut over tensor ranks
    VALUES = True

    average: Literal["sequences", "tokens", "constant"] = "tokens"
    value_weight: float = Field(default=0.1, gt=0)
    """Of the loss of the values."""
    value_clip: float = Field(default=0.2, ge=0)
    """A value is not rewarded for moving further than this from the one when the token was sampled; 0: no limit."""

    def sums(self, outputs: Outputs, batch: MicroBatch) -> Sums:
        from tidewheel.models.loss import IGNORED
        from tidewheel.train.policy.averages import token_weights
        from tidewheel.train.policy.surrogates import clipped_values

        rollouts, values = batch.rollouts, outputs.values
        assert values is not None, "the model has a value head: VALUES"
        if rollouts is None or rollouts.values is None or rollouts.returns is None:
            raise ConfigError("the rollouts have no values", where="objective.kind ppo",
                              fix="give rollouts with values and returns, or let the run make its own (`rollouts`)")
        of_policy = super().sums(outputs, batch)
        learnt = (batch.targets != IGNORED).float()
        weights = token_weights(learnt, self.average)
        losses, clipped = clipped_values(values, rollouts.values, rollouts.returns, self.value_clip)
        loss = of_policy.loss + self.value_weight * (losses * weights).sum()
        if self.average == "constant":
            weights = self.answer_tokens * token_weights(learnt, "sequences")
        found = {"value_loss": losses, "value_clipped": clipped.float(), "value": values, "return": rollouts.returns}
        own = {name: (value.detach() * weights).sum() for name, value in found.items()}
        return Sums(loss, {**of_policy.metrics, **own})
