"""Configuration of the guards. Nothing here imports torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tidewheel.config import Config

REPORTING = ("max_skips", "max_rollbacks", "collective_timeout_seconds", "start_timeout_seconds")
"""Settings that can end a run but never change what it computes."""


class GuardsConfig(Config):
    """What is done about a bad step, and about a rank that stands still.

    - skip: the update is not applied; the step counts and its data are used up.
    - rollback: the newest checkpoint is loaded and the data that did it are passed over from then on.
    - stop: the run ends with an error; nothing of the step remains.
    - ignore: the event is recorded, nothing else.
    """

    non_finite: Literal["skip", "rollback", "stop"] = "skip"
    """When the loss or the gradient is not finite."""
    spike: Literal["ignore", "skip", "rollback"] = "ignore"
    """When the loss or the gradient norm jumps; OLMo 2 skips such steps, PaLM rolled back."""
    z_score: float = Field(default=6.0, gt=0)
    """A value so many deviations above the window's median is a jump. OLMo-core's default; the deviation here is
    1.4826 x the median absolute deviation, which is the standard deviation of normal values and hardly feels the jumps
    themselves (Iglewicz and Hoaglin, 1993). The norm is judged by its logarithm."""
    window: int = Field(default=128, ge=8, le=4096)
    """Steps whose values a step is compared with (OLMo-core's default). Judging begins when half of them are there."""
    max_skips: int = Field(default=10, ge=1)
    """More steps in a row without an update end the run."""
    pass_over: int = Field(default=1, ge=1)
    """Batches that a rollback passes over: the bad step's and those before it, never further back than the checkpoint.
    PaLM passed over 200 to 500."""
    max_rollbacks: int = Field(default=5, ge=1)
    """More rollbacks of a run end it."""
    collective_timeout_seconds: float = Field(default=100.0, gt=0)
    """Ranks that wait so long for another one end with an error that names it, and the run goes on without it
    (torchtitan's `train_timeout_seconds`). Longer than the slowest step, save or evaluation of one rank."""
    start_timeout_seconds: float = Field(default=300.0, gt=0)
    """The same until the first step is done: processes start, load and compile (`init_timeout_seconds` there)."""

    @property
    def may_roll_back(self) -> bool:
        """Whether a checkpoint to go back to is needed."""
        return "rollback" in (self.non_finite, self.spike)
