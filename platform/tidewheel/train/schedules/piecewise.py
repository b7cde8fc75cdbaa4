"""Several pieces, one after the other: published schedules that no single form gives."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import pydantic
from pydantic import Field

from tidewheel.config import Config
from tidewheel.train.optim.schedule import Schedule
from tidewheel.versions import Version


class Piece(Config):
    """One piece of a schedule. It begins where the one before it ends, or at the end of the warm-up."""

    until: int = Field(ge=1)
    """Steps or tokens (`unit`) of the run at which it ends. The last piece goes on to the end of the run."""
    form: Literal["constant", "linear", "cosine"] = "constant"
    """constant: the learning rate is `final_fraction` all along. linear, cosine: it falls or rises to it."""
    final_fraction: float = Field(default=1.0, ge=0)
    """Share of the peak learning rate at its end."""
    decay_until: int | None = Field(default=None, ge=1)
    """Steps or tokens at which `form` would reach `final_fraction`, if the piece ends before: OLMo 2's cosine is over
    5 T tokens and ends at 4 T (https://arxiv.org/abs/2501.00656). Default: `until`."""

    @pydantic.model_validator(mode="after")
    def _in_order(self) -> Piece:
        if self.decay_until is not None and self.decay_until < self.until:
            raise ValueError(f"decay_until {self.decay_until} is before until {self.until}; give at least {self.until}")
        return self

    def factor(self, done: int, start: int, begin: float) -> float:
        """Return the share of the peak learning rate.

        Args:
            done: steps or tokens at the end of the step.
            start: end of the piece before.
            begin: share of the peak there.
        """
        if self.form == "constant":
            return self.final_fraction
        share = min(1.0, (done - start) / ((self.decay_until or self.until) - start))
        left = 1.0 - share if self.form == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
        return self.final_fraction + (begin - self.final_fraction) * left


class Piecewise(Schedule):
    """Pieces of constant, linear or cosine form, such as a cosine that ends before the run does."""

    VERSION = Version("schedule_piecewise", uses=(Schedule.VERSION,))

    pieces: tuple[Piece, ...] = (Piece(until=1),)
    """The pieces after the warm-up, in order. Default: the peak until the end of the run."""

    @pydantic.model_validator(mode="after")
    def _ascending(self) -> Piecewise:
        ends = [piece.until for piece in self.pieces]
        if not ends:
            raise ValueError("there are no pieces; give at least one")
        if any(end >= following for end, following in itertools.pairwise(ends)):
            raise ValueError(f"pieces must end one after the other, but they end at {', '.join(map(str, ends))}")
        if len(ends) > 1 and not self.warmup_fraction and self.warmup >= ends[0]:
            raise ValueError(f"the first piece ends at {ends[0]} {self.unit}, within the warm-up of {self.warmup}")
        return self

    def factor(self, done: int, total: int, start: int) -> float:
        begin = 1.0
        for piece in self.pieces[:-1]:
            if done <= piece.until:
                return piece.factor(done, start, begin)
            begin = piece.factor(piece.until, start, begin)
            start = piece.until
        return self.pieces[-1].factor(done, start, begin) if done > start else begin
