"""Stochastic gradient descent, with momentum and Nesterov's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pydantic
from pydantic import Field

from tidewheel.train.optim.base import Named, Optimizer, allocate, groups, on_cuda
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch

MOMENTUM = "momentum_buffer"


class SGD(Optimizer):
    """Stochastic gradient descent, as `torch.optim.SGD`.

    Its weight decay is added to the gradient (L2). Momentum is that of https://proceedings.mlr.press/v28/sutskever13.
    """

    VERSION = Version("optimizer_sgd", uses=(Optimizer.VERSION,))
    STATE = (MOMENTUM,)
    LEANER: ClassVar[Mapping[str, Any]] = {"momentum": 0.0}
    NOT_REPRODUCIBLE = ""
    NOT_OVERLAPPED = ""

    learning_rate: float = Field(default=0.1, gt=0)
    """Peak learning rate."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the sum of gradients; 0: none, and no state."""
    nesterov: bool = False
    """Take the gradient where the momentum leads."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Share of each matrix that is added to its gradient."""

    @pydantic.model_validator(mode="after")
    def _nesterov_has_momentum(self) -> SGD:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov takes the gradient where the momentum leads, and momentum is 0; nearest legal "
                             "choice: momentum 0.9")
        return self

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        from tidewheel.train.optimizers.rules import sgd

        return sgd.SGD(groups, lr=self.learning_rate, momentum=self.momentum, nesterov=self.nesterov,
                       fused=on_cuda(groups))

    def build_all(self, named: Sequence[Named]) -> list[torch.optim.Optimizer]:
        state = self.STATE if self.momentum else ()
        return [allocate(self.build(groups(named, self.weight_decay)), state)] if named else []

    def state_bytes(self, parameters: int, block_matrices: int) -> float:
        return 4.0 * parameters if self.momentum else 0.0
