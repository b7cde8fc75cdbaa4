"""The load of a step's experts: counted once per token, summed in the step's report, and balanced by a bias.

Blocks return what they routed. It is added up outside of them, because a block may be computed twice (activation
checkpointing). Nothing here runs for models without experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tidewheel.models.family import Model
from tidewheel.models.moe.balance import moved_bias
from tidewheel.models.moe.config import MixtureOfExperts
from tidewheel.models.moe.router import Router, Routing

FRACTION = 2.0**16
"""Entropies are rounded to multiples of 1 / FRACTION, so that their fp64 sum is exact and has the same bits in every
layout."""
LISTED = 2048
"""Up to this many experts of all layers together, metrics.jsonl has the tokens of each; with more, only each layer's
largest load."""
OTHER = 2
"""Numbers of a layer in the report behind its counts: the entropy and the dropped tokens."""


@dataclass(frozen=True)
class LayerLoad:
    """What the experts of one layer did in a step.

    Args:
        counts: tokens of each expert.
        entropy: mean entropy of the router's scores, in nats; ln(experts) if it does not decide.
        dropped: share of tokens that no expert computed.
    """

    counts: tuple[int, ...]
    entropy: float
    dropped: float

    @property
    def max_over_mean(self) -> float:
        """Return the largest load over the mean load: 1 if all experts have the same."""
        total = sum(self.counts)
        return max(self.counts) * len(self.counts) / total if total else 1.0


class ExpertLoad:
    """Sums the routings of one rank's part of the model, and moves its selection biases.

    Args:
        parts: the decoder, or this rank's pipeline stages.
        config: of the whole model.
        counts: whether this rank counts its tokens. Of the ranks that compute the same tokens one does; the gradients
            of the routers' losses are that rank's too.
        group: the ranks that have the other positions of the same rows.
    """

    def __init__(self, parts: Sequence[nn.Module], config: Model, *, counts: bool,
                 group: dist.ProcessGroup | None = None) -> None:
        self._config, self._counts = config, counts
        self.layers: list[int] = []
        self._experts = 0
        if isinstance(config, MixtureOfExperts):
            self.layers = [layer for layer in range(config.num_layers) if config.has_experts(layer)]
            self._experts = config.num_experts
        self._row = {layer: row for row, layer in enumerate(self.layers)}
        self._routers: dict[int, Router] = {}
        for part in parts if self.layers else ():
            for layer, block in part.layers():  # type: ignore[operator]
                for module in block.modules():
                    if isinstance(module, Router):
                        self._routers[layer] = module
            part.register_forward_hook(self._add)
        if group is not None:
            for router in self._routers.values():
                router.sum_counts = partial(_summed, group)
        self._sums: torch.Tensor | None = None

    def begin(self, scale: torch.Tensor | float | None) -> None:
        """Forget the last step.

        Args:
            scale: factor of the loss in the backward pass; None: 1.
        """
        self._sums = None
        share = 1.0 if scale is None else scale
        for router in self._routers.values():
            router.loss_scale = share if self._counts else 0.0

    def _add(self, part: nn.Module, arguments: Any, output: Any) -> None:
        """Add the routings of a micro-batch, after a forward pass that trains."""
        if not (torch.is_grad_enabled() and self._counts):
            return
        routings: dict[int, Routing] = part.routings  # type: ignore[assignment]
        for layer, routing in routings.items():
            if self._sums is None:
                self._sums = self._zeros(routing.counts.device)
            row = self._sums[self._row[layer]]
            row[:self._experts] += routing.counts
            row[self._experts] += (routing.entropy.double() * FRACTION).round() / FRACTION
            row[self._experts + 1] += routing.dropped

    def _zeros(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(len(self.layers), self._experts + OTHER, dtype=torch.float64, device=device)

    def report(self, device: torch.device) -> torch.Tensor:
        """Return this rank's part of the step's report, fp64: whole numbers and multiples of 1 / FRACTION.

        Args:
            device: of the result, on which the model computes.
        """
        sums = self._zeros(device) if self._sums is None else self._sums
        return sums.flatten()

    @torch.no_grad()
    def balance(self, total: torch.Tensor, skip: torch.Tensor | None) -> None:
        """Move the selection biases of this rank's layers, before the optimizer updates the parameters.

        Args:
            total: sum over ranks of `report`.
            skip: scalar; if it is not zero the step does not count, and nothing moves.
        """
        config = self._config
        if not (self._routers and isinstance(config, MixtureOfExperts) and config.moves_bias):
            return
        counts = total.view(len(self.layers), -1)[:, :self._experts]
        biases = torch.stack([router.selection_bias for router in self._routers.values()])
        of_layers = torch.stack([counts[self._row[layer]] for layer in self._routers])
        moved = moved_bias(biases, of_layers.to(biases.device), config.balancing_rate)
        if skip is not None:
            moved = torch.where(skip.to(biases.device) != 0, biases, moved)
        for router, bias in zip(self._routers.values(), moved):
            router.selection_bias.copy_(bias)

    def loads(self, total: Sequence[float]) -> dict[int, LayerLoad]:
        """Return the load of each layer of the whole model.

        Args:
            total: values of the sum over ranks of `report`.
        """
        width = self._experts + OTHER
        loads = {}
        for layer, row in self._row.items():
            values = total[row * width:(row + 1) * width]
            counts = tuple(int(value) for value in values[:self._experts])
            per_token = getattr(self._config, "experts_per_token", 1)
            tokens = max(1.0, sum(counts) / per_token)
            loads[layer] = LayerLoad(counts, values[self._experts] / tokens, values[self._experts + 1] / tokens)
        return loads


def _summed(group: dist.ProcessGroup, counts: torch.Tensor) -> torch.Tensor:
    total = counts.clone()
    dist.all_reduce(total, group=group)
    return total


def figures(loads: Mapping[int, LayerLoad]) -> dict[str, Any]:
    """Return the entries of a step in metrics.jsonl: means over layers, and the loads by layer.

    Args:
        loads: of each layer.
    """
    if not loads:
        return {}
    ratios = {str(layer): load.max_over_mean for layer, load in loads.items()}
    entries: dict[str, Any] = {
        "expert_load_max": max(ratios.values()), "expert_load_mean_max": sum(ratios.values()) / len(ratios),
        "router_entropy": sum(load.entropy for load in loads.values()) / len(loads),
        "dropped_share": sum(load.dropped for load in loads.values()) / len(loads),
        "expert_load_by_layer": {layer: round(ratio, 4) for layer, ratio in ratios.items()}}
    if sum(len(load.counts) for load in loads.values()) <= LISTED:
        entries["expert_tokens"] = {str(layer): list(load.counts) for layer, load in loads.items()}
    return entries
