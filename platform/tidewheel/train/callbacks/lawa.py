"""The mean of the latest parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from tidewheel.train.average import Average

if TYPE_CHECKING:
    import torch


class LAWA(Average):
    """Latest weight averaging (LAWA): the mean of the parameters at the last `window` of every `every_steps` steps.

    From https://arxiv.org/abs/2209.14981; for pretraining https://arxiv.org/abs/2306.03241. It takes 4 bytes for each
    parameter, and 4 for each of the window.
    """

    every_steps: int = Field(default=100, ge=1)
    """Take the parameters in after every step that is a multiple of this."""
    window: int = Field(default=5, ge=1, le=64)
    """Latest parameters whose mean is taken."""

    @property
    def others(self) -> int:
        return self.window

    def take(self, average: list[torch.Tensor], others: Sequence[list[torch.Tensor]], parameters: list[torch.Tensor],
             count: int) -> None:
        import torch

        torch._foreach_copy_(others[count % self.window], parameters)
        held = others[:min(count + 1, self.window)]
        torch._foreach_zero_(average)
        for values in held:
            torch._foreach_add_(average, values)
        torch._foreach_div_(average, float(len(held)))
