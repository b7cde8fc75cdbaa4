"""A narrow feed-forward behind a part of a block."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import nn

from tidewheel.models.adapting.shards import own


class Narrow(nn.Module):
    """y + up(gelu(down(y))) of a part's output y [B, L, D].

    Under tensor parallelism y has this rank's positions, and the weights are whole on every rank.

    Args:
        dim: D.
        width: between the products.
        device: of the weights.
    """

    CUTS: ClassVar[dict[int, dict[str, int]]] = {}

    def __init__(self, dim: int, width: int, *, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(width, dim, device=device))
        self.up = nn.Parameter(torch.empty(dim, width, device=device))

    @classmethod
    def of(cls, module: nn.Module, width: int) -> Self:
        """Return the adapter of an attention or a feed-forward; see the class."""
        last = [layer for layer in module.modules() if isinstance(layer, nn.Linear)][-1]
        return cls(last.out_features, width, device=next(module.parameters()).device)

    def forward(self, layer: nn.Module, base: Any, *inputs: Any) -> Any:
        """Return the part's output with the adapter's; a mixture of experts' routing goes with it unchanged."""
        y = base(*inputs)
        if isinstance(y, tuple):
            return self._changed(y[0]), *y[1:]
        return self._changed(y)

    def _changed(self, y: torch.Tensor) -> torch.Tensor:
        values = y.to(self.down.dtype) if not torch.is_autocast_enabled(y.device.type) else y
        return y + F.linear(F.gelu(F.linear(values, own(self.down))), own(self.up)).to(y.dtype)
