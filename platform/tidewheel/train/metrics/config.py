"""What is measured while training, where it is written, and which steps are profiled. Nothing here imports torch."""

from __future__ import annotations

import pydantic
from pydantic import Field

from tidewheel.config import Config
from tidewheel.train.trackers import DEFAULT, KIND, ChosenTracker


class StragglerConfig(Config):
    """Detection of a rank that works longer than the others and makes them wait.

    The comparison uses a rank's own time per step: waiting for data, and computing, without waiting for other ranks.
    """

    share: float = Field(default=0.2, gt=0)
    """Name a rank whose time stays this much over the median of all ranks, for `window` readings in a row. With an
    even number of ranks, the lower median counts. `elastic.slow_worker` decides what happens to a much slower rank."""
    every_steps: int = Field(default=10, ge=0)
    """Steps between readings, one small gather each; 0: never."""
    window: int = Field(default=5, ge=1)
    """Readings in a row before a rank is named."""


class MetricsConfig(Config):
    """Destinations of the metrics of each step, in addition to the console and metrics.jsonl."""

    every_steps: int = Field(default=1, ge=1)
    """Steps between two lines of metrics; the last step also has one. Times and rates cover the steps since the last
    line."""
    loss_by_source: bool = False
    """Report the loss of each domain of `data.mixture` over the steps since the last line, under `sources`."""
    trackers: tuple[ChosenTracker, ...] = DEFAULT
    """Further destinations: names of trackers, or their settings with the name in `kind`."""
    straggler: StragglerConfig = StragglerConfig()
    """When a slow rank is named."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _trackers_of_older_versions(cls, values: object) -> object:
        for name in KIND.built_in():
            if isinstance(values, dict) and name in values:
                raise ValueError(f"{name} is a tracker: write trackers: [..., {name}], or [..., {{kind: {name}, ...}}] "
                                 "with its settings, and leave it out to turn it off")
        return values


class ProfileConfig(Config):
    """Traces of chosen steps of rank 0, in the run's profile/."""

    steps: tuple[int, ...] = Field(default=(), max_length=64)
    """Steps to profile, from 1; neighbours share one trace, which https://ui.perfetto.dev opens."""
    memory: bool = False
    """Also record who allocated what, for https://pytorch.org/memory_viz (CUDA only)."""
    stacks: bool = False
    """Also record Python stacks: slower steps, larger traces."""

    @pydantic.field_validator("steps")
    @classmethod
    def _from_one(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(step < 1 for step in value):
            raise ValueError("steps are counted from 1")
        return tuple(sorted(set(value)))
