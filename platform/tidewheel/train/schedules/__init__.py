"""The built-in schedules of the learning rate, one module each, and their registry."""

from __future__ import annotations

from typing import Annotated

from tidewheel.parts import Chosen, Kind
from tidewheel.train.optim.schedule import Schedule
from tidewheel.train.schedules.constant import Constant as Constant
from tidewheel.train.schedules.cosine import Cosine as Cosine
from tidewheel.train.schedules.linear import Linear as Linear
from tidewheel.train.schedules.piecewise import Piecewise as Piecewise
from tidewheel.train.schedules.wsd import WSD as WSD

KIND = Kind("schedule", Schedule, __name__, "tidewheel.schedules")
DEFAULT = "cosine"
ChosenSchedule = Annotated[Schedule, Chosen(KIND, DEFAULT)]
