"""When a run's state is kept, where, and for how long. Nothing here imports torch."""

from __future__ import annotations

from typing import Literal

import pydantic
from pydantic import Field

from tidewheel.config import Config


class MemoryTierConfig(Config):
    """The newest states in the memory of the nodes: what a lost worker or node is recovered from at once."""

    every_steps: int = Field(default=1, ge=0)
    """Copy the state to shared memory every so many steps; 0: never. It takes five times the state of the workers of a
    node in its memory; where that is not free, the run goes on without, with an event."""
    buddy: bool = True
    """A second copy on another node, so that the loss of a node loses nothing."""


class CheckpointConfig(Config):
    """When to save, and how many to keep."""

    every_steps: int | Literal["auto"] = 100
    """Save every so many steps, and at the end; 0: at the end and before planned changes only; auto: as often as the
    cost of a save and the rate of failures, both measured, make best (Young/Daly)."""
    every_seconds: float = Field(default=0.0, ge=0)
    """Save, too, when the last save began so long ago; 0: do not."""
    expected_failure_seconds: float = Field(default=10_800.0, gt=0)
    """For auto: time between failures before any was seen. Three hours is what Llama 3 met on 16,384 GPUs
    (2407.21783, section 3.3.4)."""
    keep_last: int = Field(default=3, ge=1)
    """Older checkpoints are deleted, but for these:"""
    keep_best: int = Field(default=0, ge=0)
    """The so many with the least validation loss are kept, too."""
    keep_every: int = Field(default=0, ge=0)
    """Those of steps that are multiples of this are kept for good; 0: none."""
    asynchronous: bool = True
    """Upload in the background while training goes on."""
    save_seconds: float = Field(default=1800.0, gt=0)
    """A save that takes longer has failed: it is given up and reported, and training goes on. The default is what
    900 GiB of a node take at 500 MB/s."""
    retry_seconds: float = Field(default=30.0, gt=0)
    """After a save that failed, save again so much later, whatever the interval."""
    max_failed_saves: int = Field(default=20, ge=0)
    """End the run when so many saves in a row have failed; 0: go on for ever."""
    memory: MemoryTierConfig = MemoryTierConfig()
    """The tier above storage."""

    @pydantic.field_validator("every_steps")
    @classmethod
    def _a_number(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError(f"{value} steps is no interval: give 0 or more, or auto")
        return value
