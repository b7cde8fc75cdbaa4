"""Engines as users write them: a stand-in for vLLM in a process of its own, and one in the generator's process."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import tidewheel as tw


class StandIn(tw.ProcessEngine):
    """The engine of `tests/engine_stand_in.py`; any Python will do for it."""

    PROGRAM: ClassVar[Path] = Path(__file__).with_name("engine_stand_in.py")
    PYTHON: ClassVar[str] = "TIDEWHEEL_STAND_IN_PYTHON"
    INSTALL: ClassVar[str] = "install a Python"
    UNDECISIVE: ClassVar[tuple[str, ...]] = (*tw.ProcessEngine.UNDECISIVE, "faults")

    faults: str = ""
    """Folder of files that make it misbehave."""

    def load_settings(self, use: tw.EngineUse) -> dict[str, Any]:
        return {"vocabulary_size": use.vocabulary_size, "stop": sorted(use.decoding.stop), "faults": self.faults}


class Dice(tw.Engine):
    """Draw tokens without looking at the weights."""

    REPEATS: ClassVar[bool] = True
    seed: int = 0

    def open(self, use: tw.EngineUse) -> tw.RunningEngine:
        return RunningDice(self.seed, use.vocabulary_size, use.decoding.stop)


class RunningDice(tw.RunningEngine):
    """An open `Dice`."""

    def __init__(self, seed: int, size: int, stop: frozenset[int]) -> None:
        self._seed, self._size, self._stop = seed, size, stop

    def load(self, weights: tw.Weights) -> None:
        assert weights.tensors

    def complete(self, prefixes: Sequence[tw.Prefix]) -> list[tw.Completion]:
        completions = []
        for prefix in prefixes:
            chance = random.Random(f"{self._seed} {prefix.seed}")
            tokens: list[int] = []
            while len(tokens) < prefix.most and not (tokens and tokens[-1] in self._stop):
                tokens.append(chance.randrange(self._size))
            completions.append(tw.Completion(tokens, [-math.log(self._size)] * len(tokens)))
        return completions
