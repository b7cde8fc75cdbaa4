"""Progress of a run, as its loop counts it and its checkpoints hold it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Progress:
    """Progress of the run; a checkpoint's `extra` holds the same."""

    step: int = 0
    """Steps done."""
    tokens: int = 0
    """Real tokens trained on."""
    recorded: int = 0
    """Last step recorded before this generation started; steps up to it are done again."""
    loss: float | None = None
    """Loss of the last step with a finite one, in nats per token."""
    validation_loss: float | None = None
    validated: int = -1
    """Step of `validation_loss`."""
    saved: int = -1
    """Step of the last save."""
    sources: dict[str, list[float]] = field(default_factory=dict)
    """Nats and predicted tokens of each source since the last line of metrics, if losses are reported by source."""
    verified: int = 0
    """Last step whose state is known good, if `guards.recomputation` checks the run."""
    skipped_keeps: int = 0
    """Steps of this generation whose copy to the memory tier was due and not made, because a rank could not make it."""


def finite(value: float) -> float | None:
    """Return a finite number as it is, and None for others: JSON has no NaN."""
    return value if math.isfinite(value) else None
