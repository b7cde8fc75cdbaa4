"""What is kept from the forward pass for the backward pass, as configuration. Nothing here imports torch."""

from __future__ import annotations

from typing import Literal

import pydantic
from pydantic import Field

from tidewheel.config import Config


class MemoryConfig(Config):
    """Activation checkpointing; it changes memory and speed, never the result."""

    activation_checkpointing: Literal["none", "full", "every_nth", "selective", "offload"] = "none"
    """What is kept of a block's forward pass until its backward pass.
    none: everything. full: the block's input, the rest is computed again (https://arxiv.org/abs/1604.06174).
    every_nth: as full, for every `every`-th block only. selective: the input and the results of attention and matrix
    products; what is cheap is computed again (https://arxiv.org/abs/2205.05198). offload: as full, and the inputs of
    blocks wait in host memory."""
    every: int = Field(default=2, ge=1)
    """every_nth: blocks 0, every, 2 every, ... are computed again."""
    recompute_products: int = Field(default=2, ge=0)
    """selective: every so many-th matrix product of a block is computed again too, as torchtitan does; 0: none is."""

    @pydantic.model_validator(mode="after")
    def _used(self) -> MemoryConfig:
        for name, kind in (("every", "every_nth"), ("recompute_products", "selective")):
            changed = getattr(self, name) != type(self).model_fields[name].default
            if changed and self.activation_checkpointing != kind:
                raise ValueError(f"{name} is for activation_checkpointing: {kind}, here it is "
                                 f"{self.activation_checkpointing}")
        return self
