"""A narrow feed-forward behind a part of a block."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tidewheel.models.adapting.added import Added
from tidewheel.models.adapting.shards import own


class Narrow(Added):
    """y + up(gelu(down(y))) of a part's output y [B, L, D].

    Under tensor parallelism y has this rank's positions, and the weights are whole on every rank.
    """

    down: nn.Parameter
    up: nn.Parameter

    def forward(self, layer: nn.Module, base: Any, *inputs: Any) -> Any:
        """Return the part's output with the adapter's; a mixture of experts' routing goes with it unchanged."""
        y = base(*inputs)
        if isinstance(y, tuple):
            return self._changed(y[0]), *y[1:]
        return self._changed(y)

    def _changed(self, y: torch.Tensor) -> torch.Tensor:
        values = y.to(self.down.dtype) if not torch.is_autocast_enabled(y.device.type) else y
        return y + F.linear(F.gelu(F.linear(values, own(self.down))), own(self.up)).to(y.dtype)
