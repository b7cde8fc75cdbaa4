"""Losses of the rows of a micro-batch, beside the sum that is minimised."""

from __future__ import annotations

import torch


class RowLosses:
    """The token losses of one forward pass, added up by row. A loss module that has one fills it."""

    def __init__(self) -> None:
        self._nats: list[torch.Tensor] = []

    def begin(self) -> None:
        """Forget the pass before."""
        self._nats.clear()

    def add(self, nats_N: torch.Tensor) -> None:
        """Take the losses of the next tokens, in the order of the flattened rows; 0 where there is no target."""
        self._nats.append(nats_N)

    def take(self, rows: int) -> torch.Tensor:
        """Return the sums of the last pass, in nats, fp64 [rows], and forget them."""
        sums = torch.cat(self._nats).view(rows, -1).double().sum(dim=1)
        self._nats.clear()
        return sums
