"""Run several groups of a small DiLoCo run, in threads or in processes, in an order that a test decides."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import yaml

import tidewheel as tw
from tests.unit.train.helpers import config
from tidewheel import jsonlog, storage
from tidewheel.checkpoint.digest import digest
from tidewheel.elastic.trainer import fit_local
from tidewheel.outer.meeting import Meetings
from tidewheel.train.config import TrainConfig

ROOT = Path(__file__).parents[3]
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


class Pause(tw.Callback):
    """At the end of each step, wait while a file exists."""

    file: str

    def on_step_end(self, worker: tw.Worker, step: tw.Step) -> None:
        while Path(self.file).exists():
            time.sleep(0.05)


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


def train_together(configs: list[TrainConfig], train: Callable[[TrainConfig], object] = fit_local) -> None:
    """Train groups at the same time, in threads, and raise the first error at once: others may wait for that group."""
    errors: list[BaseException] = []

    def run(settings: TrainConfig) -> None:
        try:
            train(settings)
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=run, args=(settings,), daemon=True) for settings in configs]
    for thread in threads:
        thread.start()
    while not errors and any(thread.is_alive() for thread in threads):
        time.sleep(0.01)
    if errors:
        raise errors[0]


def model(uri: Path | str) -> str:
    """Return the digest of the model's weights in the newest checkpoint of a run or of a store of groups."""
    return digest(str(uri)).groups["model"]


def events(settings: TrainConfig, kind: str) -> list[dict[str, Any]]:
    """Return the details of a run's events of a kind."""
    return [line["detail"] for line in jsonlog.read(storage.store(settings.run_uri), "events.jsonl")
            if line["kind"] == kind]


def last_step(settings: TrainConfig) -> int:
    """Return the last step in a run's metrics."""
    lines = jsonlog.read(storage.store(settings.run_uri), "metrics.jsonl")
    return max((int(line["step"]) for line in lines if "loss" in line), default=0)


def kill_one_on_the_way(configs: Sequence[TrainConfig], folder: Path, step: int) -> None:
    """Train two groups in processes; kill group 1 at a step and start it again after a round without it.

    Group 0 needs little patience. It is held while group 1 comes back, which takes far longer than a round here.

    Args:
        configs: of the groups.
        folder: for their configurations and logs.
        step: that group 1 has done when it is killed.

    Raises:
        RuntimeError: a group has ended early or with an error.
    """
    pause = folder / "pause"
    pause.unlink(missing_ok=True)
    held = configs[0].model_copy(update={"callbacks": (Pause(file=str(pause)),)})
    started = [_start(settings, folder) for settings in (held, configs[1])]
    try:
        _wait_for(lambda: last_step(configs[1]) >= step, started)
        os.kill(started[1].pid, signal.SIGKILL)
        started[1].wait()
        _wait_for(lambda: any(event["members"] == [0] for event in events(configs[0], "outer_round")), started[:1])
        pause.touch()
        started[1] = _start(configs[1], folder)
        outer = configs[1].outer
        assert outer is not None
        meetings = Meetings(storage.store(outer.store), group=1, groups=2)
        _wait_for(lambda: meetings.has_offered(meetings.decisions.newest() + 1), started)
        pause.unlink()
        for process in started:
            if process.wait():
                raise RuntimeError(f"a group has ended with exit code {process.returncode}, see its log in {folder}")
    finally:
        for process in started:
            process.kill()


def _start(settings: TrainConfig, folder: Path) -> subprocess.Popen[bytes]:
    """Start a group in a process of its own."""
    file = folder / f"{settings.run.id}.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in settings.canonical().items() if value is not None}))
    with (folder / f"{settings.run.id}.log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", "tidewheel", "train", str(file), "--local"], stdout=log,
                                stderr=log, cwd=ROOT)


def _wait_for(reached: Callable[[], bool], processes: Sequence[subprocess.Popen[bytes]]) -> None:
    while not reached():
        if any(process.poll() is not None for process in processes):
            raise RuntimeError("a group has ended before it could be killed or left out: give it more steps")
        time.sleep(0.1)
