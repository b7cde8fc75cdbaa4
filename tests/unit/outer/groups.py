"""Run several groups of a small DiLoCo run in threads of this process, in an order that a test decides."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Thread
from typing import Any

import tidewheel as tw
from tests.unit.train.helpers import config
from tidewheel.checkpoint.digest import digest
from tidewheel.elastic.trainer import fit_local
from tidewheel.train.config import TrainConfig

BASE = ("evaluation.sample_tokens=0", "evaluation.every_steps=0", "metrics.every_steps=1", "reproducible=true",
        "checkpoint.every_steps=0", 'data.validation=""')


class Gate(tw.Callback):
    """At the end of a step of a run, wait until a file exists."""

    run: str
    step: int
    file: str

    def on_step_end(self, worker: tw.Worker, step: tw.Step) -> None:
        while worker.run == self.run and step.step == self.step and not Path(self.file).exists():
            time.sleep(0.01)


def group(folder: Path, number: int, groups: int, *overrides: str, **outer: Any) -> TrainConfig:
    """Return the configuration of a group, the run "g0", "g1", ..., of 8 steps in rounds of 2.

    Args:
        folder: with the shards.
        number: of the group.
        groups: number of groups.
        overrides: further settings.
        outer: settings of `outer`.
    """
    settings = {"every": 2, "store": folder / "outer", "groups": groups, "group": number, **outer}
    text = ", ".join(f"{name}: {value}" for name, value in settings.items())
    return config(folder, f"g{number}", *BASE, f"outer={{{text}}}", *overrides)


def gate(run: str, step: int, file: Path) -> str:
    """Return a callback's settings: `run` waits for `file` at the end of `step`."""
    return f"{{kind: 'tests.unit.outer.groups:Gate', run: {run}, step: {step}, file: {file}}}"


def train_together(configs: list[TrainConfig]) -> None:
    """Train groups at the same time, and raise the first error."""
    errors: list[BaseException] = []

    def run(settings: TrainConfig) -> None:
        try:
            fit_local(settings)
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=run, args=(settings,)) for settings in configs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def model(uri: Path | str) -> str:
    """Return the digest of the model's weights in the newest checkpoint of a run or of a store of groups."""
    return digest(str(uri)).groups["model"]
