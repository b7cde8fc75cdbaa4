"""Adafactor, which keeps second moments of rows and columns only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from tidewheel.train.optim.base import Named, Optimizer, groups, on_cuda
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch


class Adafactor(Optimizer):
    """Adafactor (https://arxiv.org/abs/1804.04235), `torch.optim.Adafactor`, which has its own decay schedule."""

    VERSION = Version("optimizer_adafactor", uses=(Optimizer.VERSION,))
    NOT_REPRODUCIBLE = "takes means over rows and columns, which it adds up over workers"
    NOT_OVERLAPPED = "adds up means over workers in an update"
    STATE_NOTE = "a mean for each row and column; tables that count 4 have a momentum beside them"

    learning_rate: float = Field(default=1e-2, gt=0)
    """Peak learning rate, relative to each matrix's size (section 9 of https://arxiv.org/abs/1804.04235)."""

    def build_all(self, named: Sequence[Named]) -> list[torch.optim.Optimizer]:
        from tidewheel.train.optimizers.rules import adafactor

        by_decay = groups(named, self.weight_decay)
        optimizer = adafactor.Adafactor(by_decay, lr=self.learning_rate, fused=on_cuda(by_decay))
        optimizer.prepare()
        return [optimizer]

    def state_bytes(self, parameters: int, block_matrices: int) -> float:
        return 0.0  # one number for each row and column, less than a thousandth of the parameters
