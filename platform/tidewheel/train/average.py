"""The base of averages: callbacks that keep an average of the parameters, evaluated beside the parameters themselves.

    class Polyak(tw.Average):
        "Keep the mean of the parameters of all steps."

        def take(self, average, others, parameters, count):
            torch._foreach_lerp_(average, parameters, 1 / (count + 1))

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from tidewheel.train.callback import Callback

if TYPE_CHECKING:
    import torch


class Average(Callback):
    """Base of every average. Each rank averages its own part of the parameters, in fp32.

    Averages are in checkpoints, which any number of workers can load, and are evaluated at each evaluation. Nothing of
    them is communicated, and if `take` is element-wise, an average has the same bits for every number of workers in
    reproducible mode. A run that starts to keep one later begins its average with the parameters of that step.
    """

    start_step: int = Field(default=0, ge=0)
    """Take the parameters in after this step only."""
    every_steps: int = Field(default=1, ge=1)
    """Take the parameters in after every step that is a multiple of this."""

    @property
    def others(self) -> int:
        """Tensors that are kept for each parameter beside its average."""
        return 0

    def taken(self, since: int, step: int) -> int:
        """Return how often the parameters were taken in up to the end of a step.

        Args:
            since: step at which the average began.
            step: counts from 1.
        """
        begin = max(since, self.start_step)
        return max(0, step // self.every_steps - begin // self.every_steps)

    def take(self, average: list[torch.Tensor], others: Sequence[list[torch.Tensor]], parameters: list[torch.Tensor],
             count: int) -> None:
        """Take the present parameters in: change `average` and `others` in place.

        Args:
            average: this rank's parts of the averages, fp32; those of the initial parameters at first.
            others: `others` more lists of such tensors.
            parameters: this rank's parts of the parameters, fp32, in the same order.
            count: how often parameters were taken in before.
        """
        raise NotImplementedError
