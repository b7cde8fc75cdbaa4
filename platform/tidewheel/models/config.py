"""Settings of RoPE and of the loss. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from tidewheel.config import Config
from tidewheel.models.rope_scaling import RopeScaling
from tidewheel.versions import Version

TOKEN_LOSS = Version("token_loss")
"""Version of the cross-entropy and its z-loss (`models/loss.py`)."""


@dataclass(frozen=True)
class Rope:
    """The rotary position embedding of a layer.

    Args:
        width: entries of a head that turn, from the first on.
        theta: base of the frequencies.
        scaling: for sequences longer than the original length.
        length: of the longest sequence, for which dynamic scaling is computed.
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
