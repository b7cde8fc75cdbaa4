"""An exponential moving average of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from tidewheel.train.average import Average

if TYPE_CHECKING:
    import torch


class EMA(Average):
    """Exponential moving average (EMA) of the parameters: 4 bytes a parameter.

        average <- d average + (1 - d) parameters,   d = min(decay, (1 + n) / (10 + n))

    after n earlier updates; the smaller d at first forgets the initial weights (tf.train.ExponentialMovingAverage).
    The first update copies the parameters.
    """

    decay: float = Field(default=0.999, ge=0, lt=1)
    """Share of the average that an update keeps; 1 / (1 - decay) updates weigh most."""

    def take(self, average: list[torch.Tensor], others: Sequence[list[torch.Tensor]], parameters: list[torch.Tensor],
             count: int) -> None:
        import torch

        if count == 0:
            torch._foreach_copy_(average, parameters)
            return
        torch._foreach_lerp_(average, parameters, 1.0 - min(self.decay, (1 + count) / (10 + count)))
