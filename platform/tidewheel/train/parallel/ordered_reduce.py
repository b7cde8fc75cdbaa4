"""FSDP2's reduction of gradients in reproducible mode, in place of its reduce-scatter.

It is called after the backward pass of each micro-batch. What FSDP2 makes of it before the last micro-batch is not
used; `FullyShard.begin` resets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from tidewheel.train.reproducible.exchange import OrderedSum
from tidewheel.train.reproducible.gradient_order import GradientOrder


class OrderedReduceScatter(ReduceScatter):
    """Sum of a unit's gradients over ranks and micro-batches in the canonical order.

    Args:
        order: knows the current micro-batch.
        total: of the unit.
    """

    def __init__(self, order: GradientOrder, total: OrderedSum) -> None:
        self.order, self.total = order, total

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype,
                 device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.add(input_tensor)
        if self.order.last:
            output_tensor.copy_(self.total.shard())

    def add(self, flat: torch.Tensor) -> None:
        """Add a rank's gradients of the current micro-batch, in FSDP2's layout."""
        self.total.add(flat)
