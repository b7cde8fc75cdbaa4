"""Weights of tokens and ratios of answers, by the settings of a policy-gradient objective."""

from __future__ import annotations

import torch


def token_weights(learnt: torch.Tensor, average: str) -> torch.Tensor:
    """Return the weight of each token's loss, fp32 [B, L]; their sum over `Objective.count` averages as asked for.

    Args:
        learnt: fp32 [B, L], 1 for tokens that the policy sampled.
        average: `PolicyObjective.average`.
    """
    if average == "sequences":
        return learnt / learnt.sum(1, keepdim=True).clamp(min=1)
    return learnt


def ratio_of(difference: torch.Tensor, learnt: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the log of the ratio that the surrogate takes: [B, L] for tokens, [B, 1] for answers.

    Args:
        difference: fp32 [B, L], log p now minus log p when sampled.
        learnt: see `token_weights`.
        kind: `PolicyObjective.ratio`.
    """
    if kind == "token":
        return difference
    total = (difference * learnt).sum(1, keepdim=True)
    return total if kind == "product" else total / learnt.sum(1, keepdim=True).clamp(min=1)
