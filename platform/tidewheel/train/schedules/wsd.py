"""Warm-up, stable, decay (WSD)."""

from __future__ import annotations

import math
from typing import Literal

import pydantic
from pydantic import Field

from tidewheel.train.optim.schedule import Decay
from tidewheel.versions import Version


class WSD(Decay):
    """A constant learning rate until the last part of the run, then a decay (https://arxiv.org/abs/2404.06395).

    Before the decay the learning rate does not depend on the length of the run. So a run that has decayed continues,
    when it gets more steps, from its last checkpoint before the decay.
    """

    VERSION = Version("schedule_wsd", uses=(Decay.VERSION,))

    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Share of the run that is the decay; 0.1 to 0.2 is usual (https://arxiv.org/abs/2405.18392)."""
    decay_steps: int = Field(default=0, ge=0)
    """Length of the decay in steps, instead of a share."""
    decay_tokens: int = Field(default=0, ge=0)
    """Length of the decay in tokens if `unit` is tokens, instead of a share."""
    decay_form: Literal["linear", "1-sqrt", "cosine", "exponential"] = "1-sqrt"
    """Form of the decay. 1-sqrt is best in https://arxiv.org/abs/2405.18392, which compares it with linear and cosine.
    exponential is that of https://arxiv.org/abs/2404.06395, section 4.2: the rate falls by the same factor in each
    step, so `final_fraction` must be more than 0."""

    @pydantic.model_validator(mode="after")
    def _one_length(self) -> WSD:
        given = [name for name in ("decay_steps", "decay_tokens") if getattr(self, name)]
        if given and given != [f"decay_{self.unit}"]:
            raise ValueError(f"{given[0]} is given, but unit is {self.unit}: give decay_{self.unit}, or change the "
                             "unit")
        if given and "decay_fraction" in self.model_fields_set:
            raise ValueError(f"decay_fraction and {given[0]} are both given: leave one of them out")
        if self.decay_form == "exponential" and self.final_fraction == 0:
            raise ValueError("an exponential decay never reaches final_fraction 0: give more than 0, such as 0.1, or "
                             "another decay_form")
        return self

    def decays_from(self, total: int) -> float:
        length = (self.decay_steps if self.unit == "steps" else self.decay_tokens) or self.decay_fraction * total
        return max(self.warmup_end(total), total - length)

    def left(self, done: int, total: int, start: int) -> float:
        decays_from = self.decays_from(total)
        share = max(0.0, done - decays_from) / (total - decays_from)
        if self.decay_form == "1-sqrt":
            return 1.0 - math.sqrt(share)
        if self.decay_form == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * share))
        if self.decay_form == "exponential":  # `factor` undoes the interpolation: final_fraction ** share
            return (self.final_fraction**share - self.final_fraction) / (1.0 - self.final_fraction or 1.0)
        return 1.0 - share
