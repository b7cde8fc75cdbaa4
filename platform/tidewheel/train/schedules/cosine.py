"""Cosine decay."""

from __future__ import annotations

import math

from tidewheel.train.optim.schedule import Decay
from tidewheel.versions import Version


class Cosine(Decay):
    """Half a cosine (https://arxiv.org/abs/1608.03983) from the warm-up to the end of the run."""

    VERSION = Version("schedule_cosine", uses=(Decay.VERSION,))

    def left(self, done: int, total: int, start: int) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * ((done - start) / (total - start))))
