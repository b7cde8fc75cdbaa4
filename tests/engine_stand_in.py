"""A small engine that speaks the protocol of `tidewheel.engines.child.answering`: any tokens, all equally likely.

    python tests/engine_stand_in.py DESCRIPTOR

It needs neither torch nor Tidewheel, as vLLM's environment has none. Files in the folder of its setting `faults` make
it misbehave, each once: kill and stop (itself, while it samples), slow, wrong, missing, unsupported.
"""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "platform/tidewheel/engines/child"))
import answering

SLOW_SECONDS = 5.0


class StandIn:
    """Samples with seeds and the hash of the weights."""

    def __init__(self) -> None:
        self._settings: dict[str, Any] = {}
        self._weights = ""

    def _meets(self, fault: str) -> bool:
        """Return whether a fault is asked for, which it is once."""
        folder = self._settings["faults"]
        if not folder or not Path(folder, fault).exists():
            return False
        Path(folder, fault).unlink()
        return True

    def load(self, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Take the weights of a folder."""
        self._settings = settings
        for reason in (answering.MISSING, answering.UNSUPPORTED):
            if self._meets(reason):
                raise answering.Refused(reason, "as the test asked for")
        files = sorted(Path(folder).glob("*.safetensors"))
        self._weights = "".join(answering.sha256(file) for file in files)
        return {"about": "stand-in 1"}

    def complete(self, prefixes: list[dict[str, Any]], beat: answering.Beat) -> list[dict[str, Any]]:
        """Draw tokens."""
        if self._meets("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._meets("stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        until = time.monotonic() + SLOW_SECONDS if self._meets("slow") else 0.0
        while time.monotonic() < until:
            time.sleep(0.02)
            beat()
        results = [self._drawn(prefix) for prefix in prefixes]
        if self._meets("wrong"):
            results[0]["tokens"].append(self._settings["vocabulary_size"])
        return results

    def _drawn(self, prefix: dict[str, Any]) -> dict[str, Any]:
        size, stop = self._settings["vocabulary_size"], self._settings["stop"]
        chance = random.Random(f"{self._weights} {prefix['seed']} {prefix['tokens']}")
        tokens: list[int] = []
        while len(tokens) < prefix["most"] and not (tokens and tokens[-1] in stop):
            tokens.append(chance.randrange(size))
        return {"tokens": tokens, "log_probabilities": [-math.log(size)] * len(tokens)}


if __name__ == "__main__":
    answering.BEAT_SECONDS = 0.05
    answering.serve(StandIn(), int(sys.argv[1]))
