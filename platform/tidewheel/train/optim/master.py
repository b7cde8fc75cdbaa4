"""fp32 master weights of bf16 parameters: 2 + 2 + 12 bytes a parameter with AdamW."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from tidewheel.train.optim.base import Named, Optimizer
from tidewheel.train.optim.model_optimizer import ModelOptimizer


class MasterWeights(ModelOptimizer):
    """An optimizer that updates fp32 copies of the parameters, and rounds the parameters from them after each update.

    It is the mixed precision of https://arxiv.org/abs/1710.03740, as ZeRO counts it (https://arxiv.org/abs/1910.02054,
    section 3.1). Updates smaller than half a unit in the last place of a parameter are not lost. During `step` there is
    also an fp32 copy of the gradients.

    Args:
        named: (name, parameter) of less precision than fp32.
        config: the optimizer part.
    """

    def __init__(self, named: Iterable[Named], config: Optimizer) -> None:
        self._parameters = list(named)
        self._masters = [(name, nn.Parameter(parameter.detach().float())) for name, parameter in self._parameters]
        super().__init__(self._masters, config.build_all(self._masters), config.stored)

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
