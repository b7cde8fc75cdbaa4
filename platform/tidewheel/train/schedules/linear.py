"""A straight line from the peak to the end."""

from __future__ import annotations

from tidewheel.train.optim.schedule import Decay


class Linear(Decay):
    """Fall linearly over the rest of the run."""

    def left(self, done: int, total: int, start: int) -> float:
        return 1.0 - (done - start) / (total - start)
