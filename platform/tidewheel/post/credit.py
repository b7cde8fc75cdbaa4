"""From rewards to what the answers of a step are trained with: advantages, and returns for a value head.

Groups come in the order of the step and sums are exact (`math.fsum`), so the result depends on no process. The audit
computes it again from the rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tidewheel.post.advantages import advantages
from tidewheel.train.policy.config import OverlongConfig, RolloutsConfig

SMALL = 1e-8
"""Added to the variance of the advantages of a step's tokens, as in TRL's and verl's `masked_whiten`."""


@dataclass(frozen=True)
class Judged:
    """An answer with its reward. Lists have a value for each token that the policy sampled, in order."""

    reward: float
    sampled: Sequence[float]
    """Log-probabilities under the policy that sampled them."""
    referred: Sequence[float] = ()
    """Log-probabilities under the reference model; empty: there is none."""
    values: Sequence[float] = ()
    """Estimates of the return from each token on; empty: there is no value head."""

    def penalties(self, kl_weight: float) -> list[float]:
        """Return what the KL to the reference model costs at each token; [] without it."""
        if not kl_weight:
            return []
        return [kl_weight * (own - other) for own, other in zip(self.sampled, self.referred, strict=True)]


@dataclass(frozen=True)
class Credit:
    """What an answer is trained with."""

    advantage: float
    """Of all tokens; their mean if they have their own."""
    advantages: Sequence[float] = ()
    """Of each token that the policy sampled; empty: all have the same."""
    returns: Sequence[float] = ()
    """What the value head learns at each token; empty without one."""


def credits(groups: Sequence[Sequence[Judged]], settings: RolloutsConfig) -> list[list[Credit]]:
    """Return the credit of each answer, computed in fp64.

    Args:
        groups: the answers of each group of a step.
        settings: from rewards to advantages.
    """
    if settings.by_token:
        return _by_token(groups, settings)
    shaped = [[_shaped(answer, settings) - math.fsum(answer.penalties(settings.kl_weight)) for answer in group]
              for group in groups]
    return [[Credit(value) for value in group] for group in advantages(shaped, settings.advantage)]


def _by_token(groups: Sequence[Sequence[Judged]], settings: RolloutsConfig) -> list[list[Credit]]:
    decay = settings.gae_lambda if settings.advantage == "gae" else 1.0
    estimates = []
    for answer in (answer for group in groups for answer in group):
        rewards = [-cost for cost in answer.penalties(settings.kl_weight)] or [0.0] * len(answer.sampled)
        rewards[-1] += _shaped(answer, settings)
        estimates.append(estimated(rewards, answer.values or [0.0] * len(rewards), settings.gamma, decay))
    normal = iter(whitened(estimates))
    raw = iter(estimates)
    return [[_credit(next(normal), next(raw), answer) for answer in group] for group in groups]


def _credit(normal: Sequence[float], raw: Sequence[float], answer: Judged) -> Credit:
    returns = [advantage + value for advantage, value in zip(raw, answer.values)]
    return Credit(math.fsum(normal) / len(normal), normal, returns)


def _shaped(answer: Judged, settings: RolloutsConfig) -> float:
    return answer.reward - overlong(len(answer.sampled), settings.answer_tokens, settings.overlong)


def overlong(tokens: int, most: int, settings: OverlongConfig) -> float:
    """Return the penalty of an answer's length, not negative.

    Args:
        tokens: of the answer.
        most: the limit, `rollouts.answer_tokens`.
        settings: of the penalty.
    """
    beyond = tokens - (most - settings.buffer_tokens)
    if not settings.buffer_tokens or beyond <= 0:
        return 0.0
    return settings.penalty * beyond / settings.buffer_tokens


def estimated(rewards: Sequence[float], values: Sequence[float], gamma: float, decay: float) -> list[float]:
    """Return the generalised advantage estimate of each token (https://arxiv.org/abs/1506.02438, equation 16).

    With values of 0 and decay 1 it is the discounted return. Behind the last token the value is 0.

    Args:
        rewards: of each token.
        values: of each token.
        gamma: discount.
        decay: lambda.
    """
    found = []
    following, estimate = 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        estimate = reward + gamma * following - value + gamma * decay * estimate
        following = value
        found.append(estimate)
    return found[::-1]


def whitened(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return values minus the mean over all, divided by their deviation (of a sample, n - 1)."""
    every = [value for row in rows for value in row]
    mean = math.fsum(every) / len(every)
    variance = math.fsum((value - mean) ** 2 for value in every) / max(1, len(every) - 1)
    scale = 1 / math.sqrt(variance + SMALL)
    return [[(value - mean) * scale for value in row] for row in rows]
