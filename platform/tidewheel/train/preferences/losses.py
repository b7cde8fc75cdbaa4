"""Losses of preference pairs, as functions of log-probabilities. Each returns one loss per pair, fp32 [P].

Names are those of TRL, whose `_compute_loss` is their oracle (`tests/unit/train/preferences`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Ratios:
    """What a loss with a reference model sees of P pairs.

    Args:
        chosen: log(p / p of the reference) of the chosen answers, fp32 [P].
        rejected: the same of the rejected answers.
        chosen_tokens: number of tokens of the chosen answers, fp32 [P].
        rejected_tokens: the same of the rejected answers.
        beta: strength of the pull towards the reference.
        smoothing: probability that the two answers of a pair are in the wrong order.
        temperature: of DiscoPOP's modulation.
        divergence: turns log-ratios into scores; see `divergence`.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor
    beta: float
    smoothing: float = 0.0
    temperature: float = 0.05
    divergence: Callable[[torch.Tensor], torch.Tensor] = lambda ratio: ratio

    @property
    def difference(self) -> torch.Tensor:
        """Return beta x the difference of the scores."""
        return self.beta * (self.divergence(self.chosen) - self.divergence(self.rejected))

    @property
    def difference_per_token(self) -> torch.Tensor:
        """Return the difference of the scores per token, without beta."""
        chosen = self.divergence(self.chosen) / self.chosen_tokens
        return chosen - self.divergence(self.rejected) / self.rejected_tokens


def divergence(name: str, alpha: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the score of a log-ratio for an f-divergence (https://arxiv.org/abs/2309.16240), up to a constant.

    Args:
        name: reverse_kl, forward_kl, js or alpha.
        alpha: of the alpha divergence, not 1.
    """
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "reverse_kl": lambda ratio: ratio,
        "forward_kl": lambda ratio: -torch.exp(-ratio),
        "js": F.logsigmoid,
        "alpha": lambda ratio: torch.exp((alpha - 1) * ratio) / (alpha - 1)}
    return functions[name]


def smoothed(difference: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return -log sigmoid(x), with the share `smoothing` of -log sigmoid(-x) (conservative DPO)."""
    loss = -F.logsigmoid(difference)
    return loss if not smoothing else (1 - smoothing) * loss - smoothing * F.logsigmoid(-difference)


def sigmoid(ratios: Ratios) -> torch.Tensor:
    """DPO, https://arxiv.org/abs/2305.18290; with smoothing, conservative DPO (equation 3 of the rDPO paper)."""
    return smoothed(ratios.difference, ratios.smoothing)


def hinge(ratios: Ratios) -> torch.Tensor:
    """SLiC's hinge loss on DPO's difference, https://arxiv.org/abs/2309.06657."""
    return F.relu(1 - ratios.difference)


def ipo(ratios: Ratios) -> torch.Tensor:
    """IPO, https://arxiv.org/abs/2310.12036, of log-ratios per token."""
    return (ratios.difference_per_token - 1 / (2 * ratios.beta)) ** 2


def robust(ratios: Ratios) -> torch.Tensor:
    """Robust DPO, unbiased if the share `smoothing` of the pairs is swapped, https://arxiv.org/abs/2403.00409."""
    swapped = ratios.smoothing
    kept = (1 - swapped) * F.logsigmoid(ratios.difference) - swapped * F.logsigmoid(-ratios.difference)
    return -kept / (1 - 2 * swapped)


def exo_pair(ratios: Ratios) -> torch.Tensor:
    """EXO, the reverse KL to the smoothed preference, https://arxiv.org/abs/2402.00856 equation 16."""
    difference, smoothing = ratios.difference, ratios.smoothing
    kept = torch.sigmoid(difference) * (F.logsigmoid(difference) - math.log(1 - smoothing))
    return kept + torch.sigmoid(-difference) * (F.logsigmoid(-difference) - math.log(smoothing))


def nca_pair(ratios: Ratios) -> torch.Tensor:
    """NCA, https://arxiv.org/abs/2402.05369, which also keeps the chosen answer likely."""
    chosen, rejected = ratios.beta * ratios.chosen, ratios.beta * ratios.rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def sigmoid_norm(ratios: Ratios) -> torch.Tensor:
    """DPO of log-ratios per token, so that long answers have no advantage (Tülu 3, arXiv 2411.15124)."""
    return -F.logsigmoid(ratios.beta * ratios.difference_per_token)


def apo_zero(ratios: Ratios) -> torch.Tensor:
    """APO-zero, https://arxiv.org/abs/2408.06266: for a model that is worse than the chosen answers."""
    return 1 - torch.sigmoid(ratios.beta * ratios.chosen) + torch.sigmoid(ratios.beta * ratios.rejected)


def apo_down(ratios: Ratios) -> torch.Tensor:
    """APO-down, of the same paper: for a model that is better than the chosen answers."""
    difference = ratios.beta * (ratios.chosen - ratios.rejected)
    return torch.sigmoid(ratios.beta * ratios.chosen) + 1 - torch.sigmoid(difference)


def discopop(ratios: Ratios) -> torch.Tensor:
    """DiscoPOP's log-ratio modulated loss, https://arxiv.org/abs/2406.08414 section 5."""
    difference = ratios.difference
    share = torch.sigmoid(difference / ratios.temperature)
    return -F.logsigmoid(difference) * (1 - share) + torch.exp(-difference) * share


def bco_pair(ratios: Ratios) -> torch.Tensor:
    """BCO without the shift of rewards, https://arxiv.org/abs/2404.04656."""
    return -F.logsigmoid(ratios.beta * ratios.chosen) - F.logsigmoid(-ratios.beta * ratios.rejected)


def sppo_hard(ratios: Ratios) -> torch.Tensor:
    """SPPO with hard labels, https://arxiv.org/abs/2405.00675."""
    return (ratios.chosen - 0.5 / ratios.beta) ** 2 + (ratios.rejected + 0.5 / ratios.beta) ** 2


WITH_REFERENCE: dict[str, Callable[[Ratios], torch.Tensor]] = {function.__name__: function for function in (
    sigmoid, hinge, ipo, robust, exo_pair, nca_pair, sigmoid_norm, apo_zero, apo_down, discopop, bco_pair, sppo_hard)}
"""Losses that compare with a reference model, by name."""


def log_odds_ratio(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Return ORPO's log of the ratio of the odds p / (1 - p), https://arxiv.org/abs/2403.07691 equation 7.

    Args:
        chosen: log p per token of the chosen answers, fp32 [P], below 0.
        rejected: the same of the rejected answers.
    """
    return (chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected))


def _log_of_rest(log_p: torch.Tensor) -> torch.Tensor:
    """Return log(1 - p), in the form that is precise on each side of p = 1/2."""
    near_one = log_p > -math.log(2)
    low, high = torch.where(near_one, -1.0, log_p), torch.where(near_one, log_p, -0.5)
    return torch.where(near_one, torch.log(-torch.expm1(high)), torch.log1p(-torch.exp(low)))
