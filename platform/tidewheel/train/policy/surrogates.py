"""Surrogate losses of policy gradients, as functions of ratios and advantages. All take and return fp32 tensors."""

from __future__ import annotations

import torch


def clipped(log_ratio: torch.Tensor, advantages: torch.Tensor, epsilon: float, epsilon_high: float,
            most_ratio: float = 0.0) -> torch.Tensor:
    """Return PPO's clipped loss (https://arxiv.org/abs/1707.06347, equation 7), with bounds that may differ (DAPO).

    Args:
        log_ratio: log of p / p when sampled.
        advantages: broadcast over tokens.
        epsilon: the ratio is clipped from below at 1 - this.
        epsilon_high: and from above at 1 + this.
        most_ratio: clip the ratio at this whatever the sign of the advantage (https://arxiv.org/abs/1912.09729); 0: no.
    """
    ratio = log_ratio.exp()
    within = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    if most_ratio:
        ratio = ratio.clamp(max=most_ratio)
    return -torch.minimum(ratio * advantages, within * advantages)


def is_clipped(log_ratio: torch.Tensor, advantages: torch.Tensor, epsilon: float, epsilon_high: float) -> torch.Tensor:
    """Return where `clipped` has no gradient, bool.

    Args:
        log_ratio: see `clipped`, also for the others.
        advantages: broadcast over tokens.
        epsilon: lower bound.
        epsilon_high: upper bound.
    """
    ratio = log_ratio.exp()
    return ((ratio < 1 - epsilon) & (advantages < 0)) | ((ratio > 1 + epsilon_high) & (advantages > 0))


def truncated(log_ratio: torch.Tensor, log_p: torch.Tensor, advantages: torch.Tensor, most: float) -> torch.Tensor:
    """Return CISPO's loss (https://arxiv.org/abs/2506.13585, equation 4): every token keeps its gradient.

    Args:
        log_ratio: log of p / p when sampled.
        log_p: log-probabilities of the tokens.
        advantages: broadcast over tokens.
        most: the ratio, which has no gradient, is truncated at this.
    """
    return -log_ratio.exp().clamp(max=most).detach() * advantages * log_p


def soft(log_ratio: torch.Tensor, advantages: torch.Tensor, positive: float, negative: float) -> torch.Tensor:
    """Return SAPO's loss (https://arxiv.org/abs/2511.20347): a sigmoid gate in the place of clipping.

    Args:
        log_ratio: log of p / p when sampled.
        advantages: broadcast over tokens.
        positive: temperature of the gate for positive advantages.
        negative: for the others.
    """
    temperatures = torch.where(advantages > 0, positive, negative)
    return -torch.sigmoid(temperatures * (log_ratio.exp() - 1)) * 4 / temperatures * advantages


def bounded(ratio: torch.Tensor, most: float, *, truncated: bool) -> torch.Tensor:
    """Return importance ratios that are at most `most`.

    Args:
        ratio: p / p when sampled.
        most: the bound.
        truncated: larger ratios become the bound; otherwise they become 0.
    """
    return ratio.clamp(max=most) if truncated else ratio.masked_fill(ratio > most, 0.0)


def clipped_values(values: torch.Tensor, before: torch.Tensor, returns: torch.Tensor, clip: float
                   ) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PPO's loss of values and where clipping removes its gradient: half the squared error, at least that of the
    value kept within `clip` of the one before (https://arxiv.org/abs/2005.12729, section 3).

    Args:
        values: of the value head now.
        before: when the tokens were sampled.
        returns: what to learn.
        clip: how far a value may move from `before`; 0: any distance.
    """
    errors = (values - returns).square()
    if not clip:
        return errors / 2, torch.zeros_like(errors, dtype=torch.bool)
    within = before + (values - before).clamp(-clip, clip)
    clipped_errors = (within - returns).square()
    return torch.maximum(errors, clipped_errors) / 2, clipped_errors > errors


def k3(log_p: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return an unbiased estimate of KL(p || reference) that is never negative: r - log r - 1 with r = reference / p.

    Args:
        log_p: log-probabilities under the policy.
        reference: under the reference model.
    """
    difference = reference - log_p
    return difference.exp() - difference - 1
