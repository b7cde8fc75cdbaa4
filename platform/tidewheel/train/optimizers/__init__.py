"""The built-in optimizers, one module each, and their registry. Nothing imports torch before one is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from tidewheel.parts import Chosen, Kind
from tidewheel.train.optim.base import Optimizer
from tidewheel.train.optimizers.adafactor import Adafactor as Adafactor
from tidewheel.train.optimizers.adam import Adam as Adam
from tidewheel.train.optimizers.adamw import AdamW as AdamW
from tidewheel.train.optimizers.adamw8bit import AdamW8bit as AdamW8bit
from tidewheel.train.optimizers.ademamix import AdEMAMix as AdEMAMix
from tidewheel.train.optimizers.lion import Lion as Lion
from tidewheel.train.optimizers.muon import Muon as Muon
from tidewheel.train.optimizers.sgd import SGD as SGD

KIND = Kind("optimizer", Optimizer, __name__, "tidewheel.optimizers")
DEFAULT = "adamw"
ChosenOptimizer = Annotated[Optimizer, Chosen(KIND, DEFAULT)]


def where(condition: Callable[[type[Optimizer]], bool]) -> str:
    """Return the names of the built-in optimizers that meet a condition, for messages."""
    return ", ".join(name for name in KIND.built_in() if condition(KIND.find(name)))
