"""Settings of fp8. This module does not import torch."""

from __future__ import annotations

from typing import Literal

import pydantic

from tidewheel.config import Config


class Fp8Config(Config):
    """How the blocks' linear layers compute with `precision: fp8`; torchao does the work."""

    recipe: Literal["rowwise", "tensorwise"] = "rowwise"
    """rowwise: each row of an operand has its own scale, rounded to a power of two, which is more accurate. tensorwise:
    one scale for the whole operand, which is faster."""
    layers: Literal["worthwhile", "all"] = "worthwhile"
    """worthwhile: the layers that torchao has measured to be faster in fp8 on an H100, by their size. all: every layer
    whose dimensions are multiples of 16."""
    all_gather: bool = False
    """tensorwise: zero2 and zero3 also gather the weights in fp8, with half the bytes of bf16. One all-reduce after
    each update brings the scales."""
    emulate: bool = False
    """Round the operands to fp8 and multiply them in fp32, so that any device can run it; slow, for tests."""

    @pydantic.model_validator(mode="after")
    def _used(self) -> Fp8Config:
        if self.all_gather and self.recipe != "tensorwise":
            raise ValueError(f"all_gather is for recipe tensorwise, here it is {self.recipe}: one scale must fit the "
                             "rows of all ranks, in the forward and the backward pass; nearest legal choice: recipe "
                             "tensorwise, or all_gather false")
        return self
