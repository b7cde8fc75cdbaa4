"""Linear decay."""

from __future__ import annotations

from tidewheel.train.optim.schedule import Decay
from tidewheel.versions import Version


class Linear(Decay):
    """A linear decay from the warm-up to the end of the run."""

    VERSION = Version("schedule_linear", uses=(Decay.VERSION,))

    def left(self, done: int, total: int, start: int) -> float:
        return 1.0 - (done - start) / (total - start)
