"""Configuration of activation checkpointing. Nothing here imports torch."""

from __future__ import annotations

from typing import Literal

import pydantic
from pydantic import Field

from tidewheel.config import Config


class MemoryConfig(Config):
    """Activation checkpointing; it changes memory and speed, never the result."""

    activation_checkpointing: Literal["none", "full", "every_nth", "selective", "offload"] = "none"
    """What to keep of a block's forward pass until its backward pass.
    none: everything. full: the block's input; the rest is recomputed (https://arxiv.org/abs/1604.06174).
    every_nth: as full, but only for every `every`-th block. selective: the input and the results of attention and
    matrix products; cheap operations are recomputed (https://arxiv.org/abs/2205.05198). offload: as full, with the
    inputs of blocks in host memory."""
    every: int = Field(default=2, ge=1)
    """every_nth: blocks 0, every, 2 every, ... are recomputed."""
    recompute_products: int = Field(default=2, ge=0)
    """selective: also recompute every n-th matrix product of a block, as torchtitan does; 0: none."""

    @pydantic.model_validator(mode="after")
    def _used(self) -> MemoryConfig:
        for name, kind in (("every", "every_nth"), ("recompute_products", "selective")):
            changed = getattr(self, name) != type(self).model_fields[name].default
            if changed and self.activation_checkpointing != kind:
                raise ValueError(f"{name} is for activation_checkpointing: {kind}, here it is "
                                 f"{self.activation_checkpointing}")
        return self
