"""fp32 master weights of bf16 parameters: 2 + 4 + 12 bytes a parameter with AdamW."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tidewheel.train.optim.base import Named, Optimizer
from tidewheel.train.optim.disk_state import DiskState
from tidewheel.train.optim.model_optimizer import ModelOptimizer
from tidewheel.train.parallel.offloaded import with_part


class MasterWeights(ModelOptimizer):
    """An optimizer that updates fp32 copies of the parameters, and rounds the parameters from them after each update.

    It is the mixed precision of https://arxiv.org/abs/1710.03740, as ZeRO counts it (https://arxiv.org/abs/1910.02054,
    section 3.1), but with fp32 gradients. Updates smaller than half a unit in the last place of a parameter are kept.

    Args:
        named: (name, parameter) of less precision than fp32.
        config: the optimizer part.
    """

    def __init__(self, named: Iterable[Named], config: Optimizer) -> None:
        self._parameters = list(named)
        self._masters = [(name, nn.Parameter(parameter.detach().float())) for name, parameter in self._parameters]
        self._master_of = {parameter: master for (_, parameter), (_, master) in zip(self._parameters, self._masters)}
        super().__init__(self._masters, config.build_all(self._masters), config.stored)

    def started(self) -> None:
        if self.disk is not None:
            self.disk.forget()
        with torch.no_grad():
            for (_, parameter), (_, master) in zip(self._parameters, self._masters):
                master.copy_(parameter)

    @torch.no_grad()
    def step(self, skip: torch.Tensor | None = None, factor: torch.Tensor | None = None) -> None:
        for (_, parameter), (_, master) in zip(self._parameters, self._masters):
            master.grad = None if parameter.grad is None else _in_fp32(parameter.grad)
        super().step(skip, factor)
        for (_, parameter), (_, master) in zip(self._parameters, self._masters):
            if self.disk is None:
                parameter.copy_(master)
            master.grad = None

    def updated_by_gradient(self) -> list[Named]:
        return self._parameters

    @torch.no_grad()
    def update(self, parameters: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
        pairs = [(parameter, self._master_of[parameter]) for parameter in parameters]
        for parameter, master in pairs:
            assert parameter.grad is not None
            master.grad = _in_fp32(parameter.grad)
        super().update([master for _, master in pairs], factor)
        for parameter, master in pairs:
            parameter.copy_(master)
            master.grad = None

    def _updated(self, parameters: Sequence[torch.Tensor]) -> None:
        for master in parameters:
            self._of_master[master].copy_(master)

    def move_to_disk(self, folder: Path) -> None:
        pairs = zip(self._masters, self._parameters)
        self._of_master: dict[torch.Tensor, torch.Tensor] = {master: parameter for (_, master), (_, parameter) in pairs}
        self.disk = DiskState(folder, self.parts, masters=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**super().tensors(), **{f"{name}.master": master.detach() for name, master in self._masters}}


def _in_fp32(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient in fp32, without a copy if it is fp32.

    FSDP2 gives a gradient the metadata of its parameter, dtype included, which the optimizer's operators refuse.
    """
    if not isinstance(gradient, DTensor):
        return gradient.float()
    return with_part(gradient, gradient.to_local().float(), gradient.shape)
