"""Settings of evaluation tasks during training. Nothing here imports torch or ray."""

from __future__ import annotations

import pydantic
from pydantic import Field

from tidewheel.config import Config


class TasksConfig(Config):
    """Evaluation tasks that the workers answer between two steps."""

    files: list[str] = Field(default_factory=list)
    """Task files, as `tidewheel evaluate --tasks` takes them. Their data must be readable on every node."""
    every_steps: int = Field(default=0, ge=0)
    """Answer them at multiples of this many steps and at the end; 0: at the end only."""
    limit: int = Field(default=0, ge=0)
    """Number of items of each task, from the first; 0: all."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Examples before each item; default: as each file says."""
    chat: bool = False
    """Put prompts into the chat template of the training set."""

    @pydantic.model_validator(mode="after")
    def _named(self) -> TasksConfig:
        if self.every_steps and not self.files:
            raise ValueError("every_steps is given, but files is empty: name task files, or leave every_steps out")
        return self
