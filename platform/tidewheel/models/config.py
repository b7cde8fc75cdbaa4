"""Parts of a model's configuration. Nothing here imports torch."""

from __future__ import annotations

import pydantic
from pydantic import Field

from tidewheel.config import Config
from tidewheel.versions import Version

TOKEN_LOSS = Version("token_loss")
"""Version of the cross-entropy and its z-loss (`models/loss.py`)."""


class RopeScaling(Config):
    """Llama 3.1's stretching of RoPE to longer sequences (https://arxiv.org/abs/2407.21783); see `rope.frequencies`."""

    factor: float = Field(default=8.0, ge=1)
    """Slow frequencies are divided by this."""
    low_frequency_factor: float = Field(default=1.0, gt=0)
    """Frequencies with fewer turns than this in `original_length` positions are divided by `factor`."""
    high_frequency_factor: float = Field(default=4.0, gt=0)
    """Frequencies with more turns than this in `original_length` positions stay; between the two, a blend."""
    original_length: int = Field(default=8192, ge=2)
    """Sequence length before the stretching."""

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> RopeScaling:
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError(f"low_frequency_factor {self.low_frequency_factor:g} is not below "
                             f"high_frequency_factor {self.high_frequency_factor:g}")
        return self


class LossConfig(Config):
    """Next-token cross entropy."""

    chunk_tokens: int | None = Field(default=None, ge=0)
    """Logits exist for so many tokens at a time; 0: for a whole micro-batch at once. Default: whole while they are
    small, else in chunks (`loss.chunk_rows`)."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the square of each token's log-normaliser in what is minimised, 1e-4 in PaLM
    (https://arxiv.org/abs/2204.02311 section 5); the loss that is reported stays the cross entropy alone."""
