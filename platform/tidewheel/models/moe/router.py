"""The router: which experts compute a token, and with what weights.

Suffixes of names give shapes: T tokens, E experts, K slots of a token, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from tidewheel.models.loss import without_autocast
from tidewheel.models.moe.balance import auxiliary_loss, with_loss, z_loss
from tidewheel.models.moe.config import MixtureOfExperts
from tidewheel.models.moe.experts import local_part

BEST_OF_GROUP = 2
"""Scores that add up to the score of a group (DeepSeek-V3, https://arxiv.org/abs/2412.19437 section 2.1.2)."""


class Choice(NamedTuple):
    """The experts of each token.

    Args:
        experts: int64 [T, K] in gate order. A slot without an expert has E.
        weights: fp32 [T, K], 0 in a slot without an expert.
        rows: number of slots with an expert, known on the host.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    rows: int


class Routing(NamedTuple):
    """What a layer reports of a micro-batch. No gradient passes through it.

    Args:
        counts: int64 [E], tokens of each expert.
        entropy: fp32 scalar, the sum over tokens of the entropy of their normalised scores, in nats.
        dropped: int64 scalar, tokens that no expert computes; 0 unless experts choose.
    """

    counts: torch.Tensor
    entropy: torch.Tensor
    dropped: torch.Tensor


class Router(nn.Module):
    """Choose experts by score, in fp32.

    Args:
        config: the model family's settings.
    """

    selection_bias: torch.Tensor
    """fp32 [E], added to scores to choose experts, not to weigh them. It stays fp32 when parameters are 16-bit: steps
    of 1e-3 vanish in bf16. It exists whether it moves or not, so that checkpoints hold one."""

    def __init__(self, config: MixtureOfExperts) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.dim))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.EXPERT_BIAS else None
        self.register_buffer("selection_bias", torch.zeros(config.num_experts, dtype=torch.float32))
        self.sum_counts: Callable[[torch.Tensor], torch.Tensor] = lambda counts: counts
        """Adds up the counts of the ranks that share a micro-batch; context parallelism replaces it."""
        self.loss_scale: torch.Tensor | float = 1.0
        """Factor of the losses' gradients: the scale of fp16; 0 on a rank whose gradients another one computes too."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Router:
        super()._apply(fn, recurse)
        self.selection_bias = self.selection_bias.float()
        return self

    def forward(self, x_TD: torch.Tensor) -> tuple[Choice, Routing]:
        """Return the experts of each token, and what to report of them.

        Padding is routed as tokens are, and counted: experts compute it too.

        Args:
            x_TD: normalised hidden states.
        """
        config = self.config
        with without_autocast(x_TD.device.type):
            logits_TE = self._logits(x_TD)
            scores_TE = _scores(logits_TE, config)
            by_experts = config.routing == "expert_choice"
            choice = expert_choice(scores_TE, config) if by_experts else self._token_choice(logits_TE, scores_TE)
            routing = _routing(choice, scores_TE)
            return self._with_losses(choice, routing.counts, logits_TE, scores_TE), routing

    def _logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        # a batched product, because selective checkpointing keeps its result: a recomputed choice is then the same
        logits = torch.bmm(x_TD.float()[None], local_part(self.weight).float().t()[None])[0]
        return logits if self.bias is None else logits + local_part(self.bias).float()

    def _token_choice(self, logits_TE: torch.Tensor, scores_TE: torch.Tensor) -> Choice:
        config = self.config
        chosen_by = logits_TE if config.SCORES == "chosen_softmax" else scores_TE
        with torch.no_grad():
            bias = self.selection_bias.to(chosen_by.device)  # it is on the host with `parallel.offload`
            experts_TK = choose(chosen_by + bias, config)
        if config.SCORES == "chosen_softmax":
            weights_TK = logits_TE.gather(1, experts_TK).softmax(dim=-1)
        else:
            weights_TK = scores_TE.gather(1, experts_TK)
            if config.normalise_weights:
                weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + config.SCORE_EPSILON)
        return Choice(experts_TK, weights_TK * config.weight_scale, experts_TK.numel())

    def _with_losses(self, choice: Choice, counts_E: torch.Tensor, logits_TE: torch.Tensor,
                     scores_TE: torch.Tensor) -> Choice:
        config, weights = self.config, choice.weights
        if config.balancing == "auxiliary" and config.auxiliary_loss:
            shares = scores_TE / scores_TE.sum(dim=-1, keepdim=True)
            loss = auxiliary_loss(shares, self.sum_counts(counts_E), config.auxiliary_loss)
            weights = with_loss(weights, loss, self.loss_scale)
        if config.router_z_loss:
            weights = with_loss(weights, z_loss(logits_TE, config.router_z_loss), self.loss_scale)
        return choice._replace(weights=weights)


def _scores(logits_TE: torch.Tensor, config: MixtureOfExperts) -> torch.Tensor:
    return logits_TE.sigmoid() if config.SCORES == "sigmoid" else logits_TE.softmax(dim=-1)


def choose(scores_TE: torch.Tensor, config: MixtureOfExperts) -> torch.Tensor:
    """Return the experts with the highest scores of each token, int64 [T, K] in descending order.

    Args:
        scores_TE: scores with the selection bias.
        config: the number of experts of a token, and its groups.
    """
    if config.expert_groups > 1:
        grouped = scores_TE.unflatten(-1, (config.expert_groups, -1))
        group_scores = grouped.topk(BEST_OF_GROUP, dim=-1).values.sum(dim=-1)
        kept = group_scores.topk(config.groups_per_token, dim=-1).indices
        outside = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, kept, False)
        scores_TE = grouped.masked_fill(outside[..., None], -torch.inf).flatten(1)
    return scores_TE.topk(config.experts_per_token, dim=-1).indices


def expert_choice(scores_TE: torch.Tensor, config: MixtureOfExperts) -> Choice:
    """Let each expert choose the tokens with the highest scores (https://arxiv.org/abs/2202.09368).

    All experts take the same number of tokens; a token may have any number of experts. The choice compares all tokens
    of the micro-batch, later ones included, so it is not causal: a loss computed with it sees the future a little, and
    generation token by token chooses otherwise.

    Args:
        scores_TE: scores of all tokens.
        config: the average number of experts of a token.
    """
    tokens, experts = scores_TE.shape
    taken = min(tokens, max(1, tokens * config.experts_per_token // experts))
    with torch.no_grad():
        chosen = scores_TE.topk(taken, dim=0).indices  # [taken, E]
        is_chosen = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(0, chosen, True)
        numbers = torch.arange(experts, device=scores_TE.device)
        experts_TE = torch.where(is_chosen, numbers, experts)
    weights_TE = scores_TE.masked_fill(~is_chosen, 0.0) * config.weight_scale
    return Choice(experts_TE, weights_TE, taken * experts)


@torch.no_grad()
def _routing(choice: Choice, scores_TE: torch.Tensor) -> Routing:
    experts = scores_TE.shape[1]
    ordered = choice.experts.flatten().sort().values
    bounds = torch.arange(experts, device=ordered.device)
    ends = torch.searchsorted(ordered, bounds, right=True)  # unlike bincount, without waiting for the device
    counts = ends.diff(prepend=ends.new_zeros(1))
    shares = scores_TE / scores_TE.sum(dim=-1, keepdim=True)
    dropped = (choice.experts == experts).all(dim=-1).sum()
    return Routing(counts, torch.special.entr(shares).sum(), dropped)
