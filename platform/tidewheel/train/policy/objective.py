"""The base of objectives of reinforcement learning. It does not import torch before training.

A row is a rollout: a prompt and an answer that some version of the policy sampled. The data bring the log-probability
of each sampled token under that version, and the advantage of the rollout. How groups of rollouts get advantages is
decided where they are made (`rollouts.advantages`), so an objective sees no other rollouts of the group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import pydantic
from pydantic import Field

from tidewheel.errors import ConfigError
from tidewheel.shards.manifest import ROLLOUTS
from tidewheel.train.objective import Dimension, Objective, Outputs, Sums
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch

    from tidewheel.train.step import MicroBatch

SURROGATE = Version("policy_surrogate")
"""Version of `policy.surrogates` and of the averages below."""
METRICS = ("ratio", "clipped", "gap", "entropy", "reference_kl")
"""ratio: p / p when sampled. clipped: share of tokens whose gradient clipping removes. gap: |log ratio|; 0 when the
sampler was the present policy and computes as training does. entropy: in nats. reference_kl: to the reference model."""


class PolicyObjective(Objective):
    """Base of policy-gradient objectives over rollouts. Losses are to be minimised, in units of the advantages."""

    READS = ROLLOUTS
    METRICS: ClassVar[tuple[str, ...]] = METRICS
    WORKS_WITH: ClassVar[tuple[Dimension, ...]] = ("tensor", "pipeline")
    UNDECISIVE = ("chunk_tokens",)

    average: Literal["sequences", "tokens", "constant"] = "sequences"
    """sequences: mean over the tokens of an answer, then over answers (GRPO). tokens: mean over all tokens of the
    global batch (DAPO). constant: sum over tokens, divided by `answer_tokens` times the answers (Dr. GRPO)."""
    answer_tokens: int = Field(default=0, ge=0)
    """Divisor of average constant, usually the longest answer allowed."""
    ratio: Literal["token", "sequence", "product"] = "token"
    """token: each token has its own ratio. sequence: the geometric mean over the answer (GSPO). product: the product
    over the answer, its exact importance ratio (RLOO)."""
    epsilon: float = Field(default=0.2, gt=0)
    """Clip the ratio from below at 1 - this."""
    epsilon_high: float = Field(default=0.2, gt=0)
    """Clip the ratio from above at 1 + this."""
    most_ratio: float = Field(default=0.0, ge=0)
    """Clip the ratio at this also where the advantage is negative (dual clipping); 0: do not."""
    mask_ratio: float = Field(default=0.0, ge=0)
    """Leave out tokens whose ratio is above this or below its inverse, because the sampler computed something else than
    training does; 0: leave out none."""
    correction: Literal["none", "truncated", "masked"] = "none"
    """Importance correction for a sampler that is not the present policy. none: it is in the ratio that is clipped.
    truncated, masked: that ratio is to the present policy, and each loss is multiplied by p / p when sampled, without a
    gradient; above `correction_bound` it is that bound (https://fengyao.notion.site/off-policy-rl), or 0."""
    correction_level: Literal["token", "sequence"] = "token"
    """token: each token has its own correction. sequence: the product over the answer."""
    correction_bound: float = Field(default=3.0, ge=1)
    """Largest correction; 3 is TRL's."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature that the rollouts were sampled with."""
    reference_weight: float = Field(default=0.0, ge=0)
    """Add this times the KL divergence to the reference model, k3 of http://joschu.net/blog/kl-approx.html. The
    rollouts then need `reference` log-probabilities."""
    entropy_weight: float = Field(default=0.0, ge=0)
    """Subtract this times the entropy, averaged as the loss is."""
    chunk_tokens: int = Field(default=1024, ge=0)
    """Tokens whose logits are in memory at once. Logits of several chunks are computed again in the backward pass. 0:
    all tokens at once."""

    @pydantic.model_validator(mode="after")
    def _possible(self) -> PolicyObjective:
        if self.average == "constant" and not self.answer_tokens:
            raise ValueError("average constant divides by answer_tokens, which is 0: set it to the most tokens of an "
                             "answer, rollouts.answer_tokens")
        if self.answer_tokens and self.average != "constant":
            raise ValueError(f"answer_tokens has no effect on average {self.average}; leave it out")
        if self.most_ratio and self.most_ratio <= 1:
            raise ValueError(f"most_ratio {self.most_ratio:g} would clip a ratio of 1; nearest legal choice: 2")
        if self.correction == "none" and (self.correction_level, self.correction_bound) != ("token", 3.0):
            raise ValueError("correction_level and correction_bound have no effect on correction none; nearest legal "
                             "choice: correction truncated")
        if self.mask_ratio and self.mask_ratio <= 1:
            raise ValueError(f"mask_ratio {self.mask_ratio:g} would leave out a ratio of 1; nearest legal choice: 2")
        return self

    @property
    def logit_tokens(self) -> int | None:
        return self.chunk_tokens

    def count(self, batch: MicroBatch) -> int:
        """Return the divisor of the micro-batch's sums, see `average`."""
        if self.average == "tokens":
            return batch.num_targets
        return len(batch.tokens) * (self.answer_tokens if self.average == "constant" else 1)

    def surrogate(self, log_ratio: torch.Tensor, log_p: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token, fp32 [B, L].

        Args:
            log_ratio: fp32 [B, L], or [B, 1] with one ratio for an answer.
            log_p: fp32 [B, L], log-probabilities of the tokens.
            advantages: fp32 [B, 1], or [B, L] if tokens have their own.
        """
        from tidewheel.train.policy.surrogates import clipped

        return clipped(log_ratio, advantages, self.epsilon, self.epsilon_high, self.most_ratio)

    def sums(self, outputs: Outputs, batch: MicroBatch) -> Sums:
        import math

        import torch

        from tidewheel.models.loss import IGNORED
        from tidewheel.train.policy.averages import ratio_of, token_weights
        from tidewheel.train.policy.surrogates import bounded, is_clipped, k3
        from tidewheel.train.policy.token_statistics import token_statistics

        rollouts = batch.rollouts
        assert rollouts is not None, "checked before training: the set is of rollouts"
        if self.reference_weight and rollouts.referred is None:
            raise ConfigError("the rollouts have no log-probabilities under a reference model",
                              where="objective.reference_weight", fix="leave it out, or give rollouts that have them")
        log_p, entropy = token_statistics(outputs, batch, temperature=self.temperature,
                                          chunk_tokens=self.chunk_tokens, entropy_gradient=self.entropy_weight > 0)
        learnt = (batch.targets != IGNORED).float()
        weights = token_weights(learnt, self.average)
        advantages = rollouts.advantages if rollouts.advantages.ndim == 2 else rollouts.advantages[:, None]
        difference = log_p - rollouts.sampled
        log_ratio = ratio_of(difference, learnt, self.ratio)
        kept = weights
        if self.correction != "none":
            log_ratio = ratio_of(log_p - log_p.detach(), learnt, self.ratio)
            level = "token" if self.correction_level == "token" else "product"
            correction = ratio_of(difference.detach(), learnt, level).exp()
            kept = weights * bounded(correction, self.correction_bound, truncated=self.correction == "truncated")
        if self.mask_ratio:
            kept = kept.masked_fill(difference.detach().abs() > math.log(self.mask_ratio), 0.0)
        loss = (self.surrogate(log_ratio, log_p, advantages) * kept).sum()
        kl = torch.zeros_like(log_p) if rollouts.referred is None else k3(log_p, rollouts.referred)
        if self.reference_weight:
            loss = loss + self.reference_weight * (kl * weights).sum()
        if self.entropy_weight:
            loss = loss - self.entropy_weight * (entropy * weights).sum()
        with torch.no_grad():
            if self.average == "constant":  # metrics are means over tokens, then over answers
                weights = self.answer_tokens * token_weights(learnt, "sequences")
            removed = is_clipped(log_ratio, advantages, self.epsilon, self.epsilon_high)
            ratio = ratio_of(difference, learnt, self.ratio).exp()
            values = {"ratio": ratio, "clipped": removed.float(), "gap": difference.abs(), "entropy": entropy,
                      "reference_kl": kl}
            metrics = {name: (value * weights).sum() for name, value in values.items()}
        return Sums(loss, metrics)
