"""The sums of a policy-gradient objective over a micro-batch."""

from __future__ import annotations

import torch

from tidewheel.models.loss import IGNORED
from tidewheel.train.objective import Outputs, Sums
from tidewheel.train.policy.objective import PolicyObjective
from tidewheel.train.policy.surrogates import is_clipped, k3
from tidewheel.train.policy.token_statistics import token_statistics
from tidewheel.train.step import MicroBatch


def policy_sums(objective: PolicyObjective, outputs: Outputs, batch: MicroBatch) -> Sums:
    """Return the loss and the metrics of rows of rollouts.

    Args:
        objective: its settings and its surrogate.
        outputs: the model's.
        batch: rows of rollouts.
    """
    rollouts = batch.rollouts
    assert rollouts is not None, "checked before training: the set is of rollouts"
    log_p, entropy = token_statistics(outputs, batch, temperature=objective.temperature,
                                      chunk_tokens=objective.chunk_tokens,
                                      entropy_gradient=objective.entropy_weight > 0)
    learnt = (batch.targets != IGNORED).float()
    weights = _weights(objective, learnt)
    advantages = rollouts.advantages[:, None]
    difference = log_p - rollouts.sampled
    log_ratio = _log_ratio(objective, difference, learnt)
    losses = objective.surrogate(log_ratio, log_p, advantages)
    kept = weights
    if objective.mask_ratio:
        outside = difference.detach().abs() > torch.tensor(objective.mask_ratio).log()
        kept = weights.masked_fill(outside, 0.0)
    loss = (losses * kept).sum()
    kl = torch.zeros_like(log_p)
    if rollouts.referred is not None:
        kl = k3(log_p, rollouts.referred)
    if objective.reference_weight:
        loss = loss + objective.reference_weight * (kl * weights).sum()
    if objective.entropy_weight:
        loss = loss - objective.entropy_weight * (entropy * weights).sum()
    with torch.no_grad():
        scaled = weights * (objective.answer_tokens / learnt.sum(1, keepdim=True).clamp(min=1)
                            if objective.average == "constant" else 1)
        removed = is_clipped(log_ratio, advantages, objective.epsilon, objective.epsilon_high)
        values = {"ratio": log_ratio.exp(), "clipped": removed.float(), "gap": difference.abs(), "entropy": entropy,
                  "reference_kl": kl}
        metrics = {name: (value * scaled).sum() for name, value in values.items()}
    return Sums(loss, metrics)


def _weights(objective: PolicyObjective, learnt: torch.Tensor) -> torch.Tensor:
    """Return the weight of each token's loss, fp32 [B, L]; their sum over `count` averages as `average` says."""
    if objective.average == "sequences":
        return learnt / learnt.sum(1, keepdim=True).clamp(min=1)
    return learnt


def _log_ratio(objective: PolicyObjective, difference: torch.Tensor, learnt: torch.Tensor) -> torch.Tensor:
    """Return the log of the ratio that the surrogate takes: [B, L] for tokens, [B, 1] for answers."""
    if objective.ratio == "token":
        return difference
    total = (difference * learnt).sum(1, keepdim=True)
    return total if objective.ratio == "product" else total / learnt.sum(1, keepdim=True).clamp(min=1)
