"""Configuration of the optimizer and of the learning rate. Nothing here imports torch."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from pydantic import Field

from tidewheel.config import Config

DEFAULTS: dict[str, dict[str, Any]] = {
    # the step is the sign of the moments: a tenth of AdamW's rate, ten times its decay (section 5 of 2302.06675)
    "lion": {"learning_rate": 3e-4, "betas": (0.9, 0.99), "weight_decay": 1.0},
    "adafactor": {"learning_rate": 1e-2},  # relative to each matrix's size (section 9 of 1804.04235)
}
"""What differs from the fields' defaults, by kind."""


class OptimizerConfig(Config):
    """The update of the weights. Weight decay is decoupled, and there is none on norms, biases and embeddings."""

    kind: Literal["adamw", "adamw8bit", "adafactor", "lion", "muon"] = "adamw"
    """AdamW (https://arxiv.org/abs/1711.05101); the same with its moments in 8 bits (https://arxiv.org/abs/2110.02861);
    Adafactor (https://arxiv.org/abs/1804.04235); Lion (https://arxiv.org/abs/2302.06675); Muon for the blocks' matrices
    with AdamW for the rest (https://arxiv.org/abs/2502.16982)."""
    learning_rate: float = Field(default=3e-3, gt=0)
    """Peak learning rate; of Lion 3e-4, of Adafactor 1e-2 by default. Muon's is on AdamW's scale."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment; of Lion (0.9, 0.99) by default. Adafactor has a schedule of its own."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment (AdamW)."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay of Muon's momentum, which is Nesterov's."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Weight decay of matrices, times the learning rate; of Lion 1.0 by default."""
    clip_norm: float = Field(default=1.0, ge=0)
    """The gradient is scaled down to this norm; 0: never."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _of_the_kind(cls, values: Any) -> Any:
        return {**DEFAULTS.get(values.get("kind", ""), {}), **values} if isinstance(values, dict) else values

    @pydantic.field_validator("betas")
    @classmethod
    def _in_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("betas must be in [0, 1)")
        return value


class ScheduleConfig(Config):
    """Learning rate over the run: linear warm-up, then a decay."""

    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Form of the decay over the rest of the run; wsd (warm-up, stable, decay): at the peak until the last part of it
    (https://arxiv.org/abs/2404.06395)."""
    unit: Literal["steps", "tokens"] = "steps"
    """What the learning rate is a function of. Tokens count sequences x their length, padding included; the two differ
    only while the batch grows (batch.ramp)."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps of linear warm-up; at most half of the run."""
    warmup_tokens: int = Field(default=0, ge=0)
    """The same with unit tokens."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of the peak learning rate that is left at the last step."""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Share of the run in which wsd decays; 0.1 to 0.2 is usual (https://arxiv.org/abs/2405.18392)."""
    decay_form: Literal["linear", "1-sqrt"] = "1-sqrt"
    """How wsd decays; 1-sqrt does best in https://arxiv.org/abs/2405.18392."""

    @pydantic.model_validator(mode="after")
    def _one_unit(self) -> ScheduleConfig:
        other = "warmup_tokens" if self.unit == "steps" else "warmup_steps"
        if other in self.model_fields_set and getattr(self, other):
            raise ValueError(f"{other} is given, but unit is {self.unit}: give warmup_{self.unit}, or change the unit")
        return self

    @property
    def warmup(self) -> int:
        """Of the warm-up, in `unit`."""
        return self.warmup_steps if self.unit == "steps" else self.warmup_tokens
