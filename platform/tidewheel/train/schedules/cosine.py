"""Half a cosine from the peak to the end."""

from __future__ import annotations

import math

from tidewheel.train.optim.schedule import Decay


class Cosine(Decay):
    """Fall along half a cosine (https://arxiv.org/abs/1608.03983) over the rest of the run."""

    def left(self, done: int, total: int, start: int) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * ((done - start) / (total - start))))
