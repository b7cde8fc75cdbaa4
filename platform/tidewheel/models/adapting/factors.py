"""Learned factors of a linear layer's inputs or outputs: IA3."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import nn

from tidewheel.models.adapting.shards import like, own


class Factors(nn.Module):
    """A factor for each output of a linear layer, or for each input.

    Args:
        width: number of factors.
        of_inputs: multiply the inputs.
        device: of the factors.
    """

    OUTPUT_CUTS: ClassVar[dict[int, dict[str, int]]] = {0: {"l": 0}, 1: {}}
    CAN_UNMERGE: ClassVar[bool] = True
    CHANGES_BIAS: ClassVar[bool] = True
    INPUT_CUTS: ClassVar[dict[int, dict[str, int]]] = {0: {}, 1: {"l": 0}}

    def __init__(self, width: int, *, of_inputs: bool, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.of_inputs = of_inputs
        self.CUTS = self.INPUT_CUTS if of_inputs else self.OUTPUT_CUTS
        self.l = nn.Parameter(torch.empty(width, device=device))  # its name in the paper

    @classmethod
    def of(cls, module: nn.Module, *, of_inputs: bool) -> Self:
        """Return the factors of a linear layer; see the class."""
        assert isinstance(module, nn.Linear)
        device = next(module.parameters()).device
        return cls(module.in_features if of_inputs else module.out_features, of_inputs=of_inputs, device=device)

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
