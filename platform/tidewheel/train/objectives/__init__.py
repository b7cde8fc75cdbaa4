"""The built-in objectives, one module each, and their registry. Nothing imports torch before training."""

from __future__ import annotations

from typing import Annotated

from tidewheel.parts import Chosen, Kind
from tidewheel.train.objective import Objective
from tidewheel.train.objectives.next_token import NextToken as NextToken

KIND = Kind("objective", Objective, __name__, "tidewheel.objectives")
DEFAULT = "next_token"
ChosenObjective = Annotated[Objective, Chosen(KIND, DEFAULT)]
