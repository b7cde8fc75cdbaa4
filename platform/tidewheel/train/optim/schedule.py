"""The base of schedules: a part that computes the learning rate from the progress of the run.

    class Steps(tw.Schedule):
        "Halve the learning rate every `every` steps."
        every: int = 1000

        def factor(self, done, total, start):
            return 0.5 ** ((done - start) // self.every)
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import pydantic
from pydantic import Field

from tidewheel.errors import ConfigError
from tidewheel.parts import Part, calling, name_of
from tidewheel.versions import Version


class Schedule(Part):
    """Base of every schedule: a linear warm-up, then `factor`."""

    VERSION: ClassVar[Version] = Version("schedule_warmup")
    """Version of what all schedules share: the warm-up."""

    unit: Literal["steps", "tokens"] = "steps"
    """Unit of progress. Tokens are sequences x their length, padding included. The two differ only while the batch
    grows (batch.ramp)."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps of linear warm-up; at most half of the run."""
    warmup_tokens: int = Field(default=0, ge=0)
    """Tokens of linear warm-up if `unit` is tokens; at most half of the run."""

    @pydantic.model_validator(mode="after")
    def _one_unit(self) -> Schedule:
        other = "warmup_tokens" if self.unit == "steps" else "warmup_steps"
        if other in self.model_fields_set and getattr(self, other):
            raise ValueError(f"{other} is given, but unit is {self.unit}: give warmup_{self.unit}, or change the unit")
        return self

    @property
    def warmup(self) -> int:
        """Return the length of the warm-up in `unit`."""
        return self.warmup_steps if self.unit == "steps" else self.warmup_tokens

    def factor(self, done: int, total: int, start: int) -> float:
        """Return the share of the peak learning rate after the warm-up.

        Args:
            done: steps or tokens (`unit`) at the end of the step, start < done <= total.
            total: steps or tokens of the whole run.
            start: end of the warm-up.
        """
        raise NotImplementedError

    def learning_rate(self, done: int, total: int, peak: float) -> float:
        """Return the learning rate of the step that ends at `done`.

        Args:
            done: steps or tokens (`unit`) including this step; 1 <= done <= total.
            total: steps or tokens of the whole run.
            peak: learning rate at the end of the warm-up, which takes at most half of the run.

        Raises:
            ConfigError: `factor` failed, or returned a negative or infinite number.
        """
        start = min(self.warmup, total // 2)
        if done <= start:
            return peak * done / start
        with calling(self):
            factor = float(self.factor(done, total, start))
        if not 0.0 <= factor < math.inf:
            raise ConfigError(f"the schedule {name_of(type(self))} gives {factor} at {done:,} of {total:,} {self.unit}",
                              where="schedule.kind", fix="return a share of the peak learning rate, 0 or more")
        return peak * factor


class Decay(Schedule):
    """Base of schedules that end at a given share of the peak."""

    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of the peak learning rate at the last step."""

    def left(self, done: int, total: int, start: int) -> float:
        """Return the remaining share of the decay, 1 at `start` and 0 at `total`; see `factor` for the arguments."""
        raise NotImplementedError

    def factor(self, done: int, total: int, start: int) -> float:
        return self.final_fraction + (1.0 - self.final_fraction) * self.left(done, total, start)
