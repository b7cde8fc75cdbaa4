"""The built-in engines that sample rollouts, one module each, and their registry: `tw.engines.Vllm(python=...)`."""

from __future__ import annotations

from typing import Annotated

from tidewheel.engines.native import Native as Native
from tidewheel.engines.serving.base import Engine
from tidewheel.engines.vllm import Vllm as Vllm
from tidewheel.parts import Chosen, Kind

KIND = Kind("engine", Engine, __name__, "tidewheel.engines")
DEFAULT = Native()
ChosenEngine = Annotated[Engine, Chosen(KIND)]
