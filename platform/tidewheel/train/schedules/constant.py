"""A constant learning rate."""

from __future__ import annotations

from tidewheel.train.optim.schedule import Schedule
from tidewheel.versions import Version


class Constant(Schedule):
    """The peak learning rate after the warm-up."""

    VERSION = Version("schedule_constant", uses=(Schedule.VERSION,))

    def factor(self, done: int, total: int, start: int) -> float:
        return 1.0
