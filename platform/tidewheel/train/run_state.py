"""Where a run is, as its loop counts and its checkpoints say."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Progress:
    """Where the run is; `extra` of a checkpoint holds the same."""

    step: int = 0
    """Steps done."""
    tokens: int = 0
    """Real tokens trained on."""
    recorded: int = 0
    """Last step recorded before this generation began; steps up to it are done again."""
    loss: float | None = None
    validation_loss: float | None = None
    validated: int = -1
    """Step of `validation_loss`."""
    saved: int = -1
    """Step of the last save."""


def finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
