"""A callback at which the workers of a run wait until a test has killed one of them."""

from __future__ import annotations

import os
import shutil
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import tidewheel as tw


class Held(tw.Callback):
    """On every rank, at the end of a step, say which process waits, and wait while the file "hold" exists."""

    EVERY_RANK = True
    folder: str
    step: int

    def on_step_end(self, worker: tw.Worker, step: tw.Step) -> None:
        hold = Path(self.folder) / "hold"
        if step.step == self.step and hold.exists():
            (hold.parent / f"waits-{os.getpid()}").touch()
            while hold.exists():
                time.sleep(0.02)


def held(folder: Path, step: int) -> str:
    """Return the callback's settings, and let it wait.

    The callback is in a module of its own in the folder, from which the run must be able to import it: the hash of a
    part's source covers its whole package, and that of the tests may change while a test runs.
    """
    (folder / "hold").touch()
    name = "waiting_" + "".join(letter if letter.isalnum() else "_" for letter in folder.name)
    shutil.copy(__file__, folder / f"{name}.py")
    return f"{{kind: '{name}:Held', folder: {folder}, step: {step}}}"


def kill_one_of(workers: int, folder: Path, training: Future[Any], seconds: float = 600) -> int:
    """Kill one of the workers that wait, and let the others go on; return its process id, 0 if they never waited."""
    until = time.monotonic() + seconds
    while len(waiting := sorted(folder.glob("waits-*"))) < workers and time.monotonic() < until and not training.done():
        time.sleep(0.05)
    victim = int(waiting[0].name.partition("-")[2]) if len(waiting) == workers else 0
    if victim:
        os.kill(victim, signal.SIGKILL)
    (folder / "hold").unlink()
    return victim
