"""fp32 master weights beside parameters of less precision: 2 + 2 + 12 bytes a parameter with AdamW."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from tidewheel.train.optim.config import OptimizerConfig
from tidewheel.train.optim.optimizer import Named, Optimizer


class Masters:
    """fp32 copies of the parameters under the same names, placed like them."""

    def __init__(self, named: Iterable[Named]) -> None:
        self._held = [(name, nn.Parameter(parameter.detach().float())) for name, parameter in named]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, copy)."""
        return self._held


class MasterWeights(Optimizer):
    """An optimizer that keeps and updates fp32 copies, and rounds the parameters from them after each update.

    Mixed precision of https://arxiv.org/abs/1710.03740 as ZeRO counts it (https://arxiv.org/abs/1910.02054, section
    3.1). An update of less than half a unit in the last place of a parameter is not lost. While `step` runs there is
    an fp32 copy of the gradients as well.
    """

    def __init__(self, named: Iterable[Named], config: OptimizerConfig) -> None:
        from tidewheel.train.optim.build import build_parts

        self._parameters = list(named)
        self._masters = Masters(self._parameters).named_parameters()
        parts, stored = build_parts(self._masters, config)
        super().__init__(self._masters, parts, stored)

    def started(self) -> None:
        with torch.no_grad():
            for (_, parameter), (_, master) in zip(self._parameters, self._masters):
                master.copy_(parameter)

    @torch.no_grad()
    def step(self, skip: torch.Tensor | None = None) -> None:
        for (_, parameter), (_, master) in zip(self._parameters, self._masters):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        super().step(skip)
        for (_, parameter), (_, master) in zip(self._parameters, self._masters):
            parameter.copy_(master)
            master.grad = None

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**super().tensors(), **{f"{name}.master": master.detach() for name, master in self._masters}}
