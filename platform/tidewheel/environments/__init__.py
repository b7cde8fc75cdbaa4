"""The built-in environments, one module each, and their registry: `tw.environments.GuessNumber(highest=9)`."""

from __future__ import annotations

from tidewheel.environments.calculator import Calculator as Calculator
from tidewheel.environments.episode.base import Environment
from tidewheel.environments.guess_number import GuessNumber as GuessNumber
from tidewheel.parts import Kind

KIND = Kind("environment", Environment, __name__, "tidewheel.environments")
