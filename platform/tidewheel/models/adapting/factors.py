"""Learned factors of a linear layer's inputs or outputs: IA3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tidewheel.models.adapting.added import Added
from tidewheel.models.adapting.shards import like, own

if TYPE_CHECKING:
    from tidewheel.models.adapter import Adapter


class Factors(Added):
    """A factor for each output of a linear layer, or for each input.

    Args:
        adapter: see `Added`, also for the next two.
        name: of the module.
        module: to adapt.
        of_inputs: multiply the inputs.
    """

    CHANGES_BIAS = True

    def __init__(self, adapter: Adapter, name: str, module: nn.Module, *, of_inputs: bool) -> None:
        super().__init__(adapter, name, module)
        self.l = self.get_parameter("l")  # its name in the paper
        self.of_inputs = of_inputs
        self.CUTS = {1 if of_inputs else 0: {"l": 0}}  # type: ignore[misc]

    def forward(self, layer: nn.Module, base: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output [..., O] of x [..., I]; see `LowRank.forward`."""
        if self.of_inputs:
            return base(like((own(x) * own(self.l)).to(x.dtype), x))
        y = base(x)
        return like((own(y) * own(self.l)).to(y.dtype), y)

    def merged(self, value: torch.Tensor) -> torch.Tensor:
        """Return the matrix [O, I] or the bias [O] of a layer that needs no adapter, in fp32."""
        return value.float() * self._factors(value)

    def unmerged(self, value: torch.Tensor) -> torch.Tensor:
        """Return the matrix or the bias from which `merged` makes this one, in fp32."""
        return value.float() / self._factors(value)

    def _factors(self, value: torch.Tensor) -> torch.Tensor:
        if value.ndim == 1:
            return torch.ones_like(value) if self.of_inputs else self.l
        return self.l if self.of_inputs else self.l[:, None]
