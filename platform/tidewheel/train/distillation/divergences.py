"""Divergences of two distributions over the same C outcomes, of log-probabilities fp32 [..., C]; each returns [...].

The outcomes are the tokens of a vocabulary, or the k most likely tokens of the teacher and one bucket for all others.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

Divergence = Literal["forward_kl", "reverse_kl", "jensen_shannon"]


def divergence(student: torch.Tensor, teacher: torch.Tensor, kind: Divergence, beta: float = 0.5) -> torch.Tensor:
    """Return the divergence of a kind, in nats.

    Args:
        student: log-probabilities [..., C].
        teacher: the same of the teacher, without a gradient.
        kind: which one.
        beta: of jensen_shannon, above 0 and below 1.
    """
    if kind == "forward_kl":
        return kl(teacher, student)
    if kind == "reverse_kl":
        return kl(student, teacher)
    return jensen_shannon(student, teacher, beta)


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return KL(p || q) = sum p (log p - log q)."""
    return (p.exp() * (p - q)).sum(dim=-1)


def jensen_shannon(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the generalised divergence beta KL(teacher || m) + (1 - beta) KL(student || m).

    m = beta teacher + (1 - beta) student. It is equation 1 of GKD (https://arxiv.org/abs/2306.13649), whose names TRL
    shares.

    Args:
        student: see `divergence`, also for the others.
        teacher: log-probabilities.
        beta: the teacher's share of m.
    """
    mixed = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    return beta * kl(teacher, mixed) + (1 - beta) * kl(student, mixed)


def top_and_rest(logits_NV: torch.Tensor, top_NK: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the log-probabilities of K tokens and of all others together, fp32 [N, K + 1], of softmax(logits / T).

    The last one is a logsumexp over the other tokens, so it is precise also where the K tokens have nearly all of the
    probability.

    Args:
        logits_NV: whole logits.
        top_NK: int64, ids of the K tokens; K is below V.
        temperature: T.
    """
    logits = logits_NV.float() / temperature
    rest = logits.scatter(1, top_NK, -math.inf).logsumexp(dim=1, keepdim=True)
    chosen = torch.cat((logits.gather(1, top_NK), rest), dim=1)
    return chosen - chosen.logsumexp(dim=1, keepdim=True)
