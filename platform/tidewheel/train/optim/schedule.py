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
    warmup_fraction: float = Field(default=0.0, ge=0, le=0.5)
    """Share of the run that is linear warm-up, instead of a length in steps or tokens; 0: as those say. It is rounded
    to whole steps or tokens. 0.001 to 0.05 is usual."""

    reheat: bool = False
    """Continue a run whose rate has begun its final decay, when it gets more steps, from its newest checkpoint: the
    rate rises again. false: from its last checkpoint before the decay (`wsd`)."""

    @pydantic.model_validator(mode="after")
    def _one_unit(self) -> Schedule:
        for name in ("warmup_steps", "warmup_tokens"):
            if self.warmup_fraction and name in self.model_fields_set and getattr(self, name):
                raise ValueError(f"warmup_fraction and {name} are both given: leave one of them out")
        other = "warmup_tokens" if self.unit == "steps" else "warmup_steps"
        if other in self.model_fields_set and getattr(self, other):
            raise ValueError(f"{other} is given, but unit is {self.unit}: give warmup_{self.unit}, or change the unit")
        return self

    @property
    def warmup(self) -> int:
        """Return the configured length of the warm-up in `unit`; see `warmup_fraction` for its share."""
        return self.warmup_steps if self.unit == "steps" else self.warmup_tokens

    def warmup_end(self, total: int) -> int:
        """Return the steps or tokens (`unit`) after which the warm-up is over, at most half of the run.

        Args:
            total: steps or tokens of the whole run.
        """
        return min(round(self.warmup_fraction * total) if self.warmup_fraction else self.warmup, total // 2)

    def decays_from(self, total: int) -> float | None:
        """Return the steps or tokens (`unit`) after which the final decay begins; None if there is no such point.

        Until then the learning rate does not depend on the end of the run, so a run that has ended can be continued
        from there with more steps (`train.continuing`).

        Args:
            total: steps or tokens of the whole run.
        """
        return None

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
        start = self.warmup_end(total)
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
