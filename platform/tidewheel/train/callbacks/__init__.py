"""The built-in callbacks, one module each, and their registry."""

from __future__ import annotations

from typing import Annotated

from tidewheel.parts import Chosen, Kind
from tidewheel.train.callback import Callback
from tidewheel.train.callbacks.ema import EMA as EMA
from tidewheel.train.callbacks.lawa import LAWA as LAWA
from tidewheel.train.callbacks.log_progress import LogProgress as LogProgress

KIND = Kind("callback", Callback, __name__, "tidewheel.callbacks")
DEFAULT: tuple[Callback, ...] = (LogProgress(),)
ChosenCallback = Annotated[Callback, Chosen(KIND)]
