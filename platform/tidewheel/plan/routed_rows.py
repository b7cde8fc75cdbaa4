"""How many rows the tokens of a mixture of experts send to experts. Imports neither torch nor numpy."""

from __future__ import annotations

from dataclasses import dataclass

from tidewheel.models.family import Model
from tidewheel.models.moe.config import MixtureOfExperts


@dataclass(frozen=True)
class RoutedRows:
    """How tokens reach experts."""

    experts: int
    """Routed experts of a layer; 1 in a dense model."""
    copies: float
    """Rows that a token sends to routed experts in a block, averaged over the blocks; 0 in a dense model."""


def routed_rows(model: Model) -> RoutedRows:
    """Return how tokens of a model reach experts."""
    if not isinstance(model, MixtureOfExperts):
        return RoutedRows(1, 0.0)
    mixed = sum(model.has_experts(layer) for layer in range(model.num_layers))
    return RoutedRows(model.num_experts, model.experts_per_token * mixed / model.num_layers)
