"""Warm-up, stable, decay (WSD)."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from tidewheel.train.optim.schedule import Decay
from tidewheel.versions import Version


class WSD(Decay):
    """A constant learning rate until the last part of the run, then a decay (https://arxiv.org/abs/2404.06395)."""

    VERSION = Version("schedule_wsd", uses=(Decay.VERSION,))

    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Share of the run that is the decay; 0.1 to 0.2 is usual (https://arxiv.org/abs/2405.18392)."""
    decay_form: Literal["linear", "1-sqrt"] = "1-sqrt"
    """Form of the decay; 1-sqrt is best in https://arxiv.org/abs/2405.18392."""

    def left(self, done: int, total: int, start: int) -> float:
        decays_from = max(start, total - self.decay_fraction * total)
        share = max(0.0, done - decays_from) / (total - decays_from)
        return 1.0 - (math.sqrt(share) if self.decay_form == "1-sqrt" else share)
