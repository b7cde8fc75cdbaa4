"""How the tokens of a mixture of experts reach experts. Imports neither torch nor numpy."""

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


@dataclass(frozen=True)
class ExpertTechniques:
    """What other trainers do with experts and Tidewheel does not. Published runs are planned with it."""

    once_per_node: bool = False
    """A row is sent to each node once, and copied there (DeepEP, https://github.com/deepseek-ai/DeepEP)."""
    fp8_rows: bool = False
    """Rows go to experts in fp8, and so do the gradients of their results (arXiv:2412.19437, section 3.3.3)."""
    overlapped: bool = False
    """Passes of another micro-batch overlap the exchange (DualPipe, arXiv:2412.19437, section 3.2.1)."""
    fp8_experts: bool = False
    """Experts compute in fp8."""


OWN = ExpertTechniques()
"""Tidewheel's."""


def routed_rows(model: Model) -> RoutedRows:
    """Return how tokens of a model reach experts."""
    if not isinstance(model, MixtureOfExperts):
        return RoutedRows(1, 0.0)
    mixed = sum(model.has_experts(layer) for layer in range(model.num_layers))
    return RoutedRows(model.num_experts, model.experts_per_token * mixed / model.num_layers)
