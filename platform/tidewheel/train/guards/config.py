"""Configuration of the guards. Nothing here imports torch."""

from __future__ import annotations

from typing import Literal

import pydantic
from pydantic import Field

from tidewheel.config import Config

REPORTING = ("max_skips", "max_rollbacks", "collective_timeout_seconds", "start_timeout_seconds", "recomputation")
"""Settings that can end a run but never change what it computes."""


class RecomputationConfig(Config):
    """Find silent corruption: sampled steps are computed twice, on different workers, and the bits are compared."""

    share: float = Field(default=0.01, gt=0, le=1)
    """Share of the steps that are computed twice. It costs about this share of the processor time, and finds a fault
    that lasts for one step with this probability; one that lasts is found at the next such step, at most 2 / share
    steps later."""


class GuardsConfig(Config):
    """Policies for bad steps and for ranks that hang.

    - skip: the update is not applied; the step counts and its data are used up.
    - rollback: the newest checkpoint is loaded, and the run passes over the data that led to the bad step.
    - stop: the run ends with an error, without the step's update.
    - ignore: an event is recorded, nothing else.
    """

    non_finite: Literal["skip", "rollback", "stop"] = "skip"
    """Policy for a loss or gradient that is not finite."""
    spike: Literal["ignore", "skip", "rollback"] = "ignore"
    """Policy for a jump of the loss or the gradient norm. OLMo 2 skips such steps, PaLM rolled back."""
    z_score: float = Field(default=6.0, gt=0)
    """A jump is a value this many deviations above the window's median (OLMo-core's default). The deviation is 1.4826 x
    the median absolute deviation: the standard deviation for normal values, and robust against the jumps themselves
    (Iglewicz and Hoaglin, 1993). The norm is judged by its logarithm."""
    window: int = Field(default=128, ge=8, le=4096)
    """Earlier steps that a step is compared with (OLMo-core's default). Judging starts when half of them are known."""
    max_skips: int = Field(default=10, ge=1)
    """The run ends after more skipped steps in a row than this."""
    pass_over: int = Field(default=1, ge=1)
    """Batches that a rollback passes over: the bad step's and those before it, never beyond the checkpoint. PaLM passed
    over 200 to 500."""
    max_rollbacks: int = Field(default=5, ge=1)
    """The run ends after more rollbacks than this."""
    rollback_rate: float = Field(default=1.0, gt=0, le=1)
    """Multiply the learning rate by this in the `rollback_rate_steps` steps behind the checkpoint that a rollback went
    back to; once for each rollback whose steps overlap."""
    rollback_rate_steps: int = Field(default=0, ge=0)
    """See `rollback_rate`."""
    collective_timeout_seconds: float = Field(default=100.0, gt=0)
    """Ranks that wait this long for another rank end with an error that names it, and the run continues without it
    (torchtitan's `train_timeout_seconds`). Must exceed the slowest step, save or evaluation of one rank."""
    start_timeout_seconds: float = Field(default=300.0, gt=0)
    """The same limit until the first step is done, while processes start, load and compile (`init_timeout_seconds`)."""
    recomputation: RecomputationConfig | None = None
    """Find silent corruption by computing sampled steps twice; needs `reproducible`. None: do not."""

    @pydantic.model_validator(mode="after")
    def _lowers_for_some_steps(self) -> GuardsConfig:
        if (self.rollback_rate < 1) != (self.rollback_rate_steps > 0):
            raise ValueError(f"rollback_rate {self.rollback_rate:g} with rollback_rate_steps "
                             f"{self.rollback_rate_steps} changes nothing: give both a factor below 1 and a number of "
                             "steps, such as 0.5 and 100, or leave both out")
        if self.rollback_rate_steps and not self.may_roll_back:
            raise ValueError("rollback_rate lowers the rate after a rollback, but no policy rolls back; nearest legal "
                             "choice: spike rollback")
        return self

    @property
    def may_roll_back(self) -> bool:
        """Whether a policy needs a checkpoint to go back to."""
        return "rollback" in (self.non_finite, self.spike)
