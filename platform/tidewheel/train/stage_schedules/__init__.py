"""The registry of stage schedules. None is built in: `contrib/pipelines` has two. Nothing here imports torch."""

from __future__ import annotations

from typing import Annotated

from tidewheel.parts import Chosen, Kind
from tidewheel.train.stage_schedule import StageSchedule

KIND = Kind("stage schedule", StageSchedule, __name__, "tidewheel.stage_schedules")
ChosenStageSchedule = Annotated[StageSchedule, Chosen(KIND)]
