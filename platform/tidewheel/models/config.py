"""Settings of RoPE and of the loss. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

import pydantic
from pydantic import Field

from tidewheel.config import Config
from tidewheel.versions import Version

TOKEN_LOSS = Version("token_loss")
"""Version of the cross-entropy and its z-loss (`models/loss.py`)."""


class RopeScaling(Config):
    """Llama 3.1's scaling of RoPE for longer sequences (https://arxiv.org/abs/2407.21783); see `rope.frequencies`."""

    factor: float = Field(default=8.0, ge=1)
    """Slow frequencies are divided by this."""
    low_frequency_factor: float = Field(default=1.0, gt=0)
    """Frequencies with fewer turns than this in `original_length` positions are divided by `factor`."""
    high_frequency_factor: float = Field(default=4.0, gt=0)
    """Frequencies with more turns than this in `original_length` positions stay; those between are interpolated."""
    original_length: int = Field(default=8192, ge=2)
    """Sequence length before scaling."""

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> RopeScaling:
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError(f"low_frequency_factor {self.low_frequency_factor:g} is not below "
                             f"high_frequency_factor {self.high_frequency_factor:g}")
        return self


@dataclass(frozen=True)
class Rope:
    """The rotary position embedding of a layer.

    Args:
        width: entries of a head that turn, from the first on.
        theta: base of the frequencies.
        scaling: for sequences longer than the original length.
        length: longest sequence, which dynamic scaling is computed for.
    """

    width: int
    theta: float
    scaling: RopeScaling | None = None
    length: int = 0


class LossConfig(Config):
    """Next-token cross-entropy."""

    chunk_tokens: int | None = Field(default=None, ge=0)
    """Number of tokens whose logits exist at a time; 0: all of a micro-batch. Default: all while they are small, else
    chunks (`loss.chunk_rows`)."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the squared log-normaliser of each token in the training loss, 1e-4 in PaLM
    (https://arxiv.org/abs/2204.02311 section 5). The reported loss is the cross-entropy alone."""
