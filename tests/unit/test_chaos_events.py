"""Events of the chaos programs find what they wait for in a run that stands still at its gate."""

from __future__ import annotations

import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos import events, rollout_events
from tests.chaos.world import Driver, World
from tidewheel.errors import OwnershipError

REFUSED = (OwnershipError.exit_code, "OwnershipError: the run is being trained by process 1")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A run at its gate, whose waits end at once; a second driver would be refused."""
    def look_once(self: World, condition: Callable[[], bool], seconds: float) -> bool:
        return condition()

    monkeypatch.setattr(World, "wait_for", look_once)
    monkeypatch.setattr(World, "second_driver", lambda self, *overrides: REFUSED)
    anything: Any = None
    return World(anything, anything, anything, {}, [Driver(time.time())], step=34)


def test_a_second_driver_comes_though_the_run_waits_for_its_gate(world: World):
    """It came two minutes late, without a second driver."""
    world.drivers[-1].told = True
    assert events.second_driver(world, random.Random(0)).startswith(f"code {OwnershipError.exit_code}: ")
    assert not world.problems


@pytest.mark.parametrize("driver", [Driver(0.0), Driver(0.0, told=True, killed=True), Driver(0.0, told=True, code=1)])
def test_no_second_driver_comes_before_the_first_one_owns_the_run(world: World, driver: Driver):
    world.drivers.append(driver)
    assert events.second_driver(world, random.Random(0)) == "no worker trained: not done"


def test_a_worker_is_killed_during_a_save_behind_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The run had done its saves when the event came, so none was ever seen."""
    gate, checkpoints = tmp_path / "gate", tmp_path / "run" / "checkpoints"
    gate.write_text("7")
    (checkpoints / "step_00000006").mkdir(parents=True)  # of a worker that was killed before: no save is going on

    def save() -> None:
        while gate.read_text() != "10":
            time.sleep(0.01)
        (checkpoints / "step_00000009").mkdir()

    worker = subprocess.Popen(["sleep", "600"])
    training = threading.Thread(target=save)
    monkeypatch.setattr(World, "trainers", lambda self: {worker.pid: None})
    config: Any = SimpleNamespace(run_uri=str(tmp_path / "run"), checkpoint=SimpleNamespace(every_steps=3))
    anything: Any = None
    world = World(anything, config, tmp_path, {"CHAOS_GATE": str(gate)}, step=7)
    try:
        training.start()
        assert rollout_events.kill_during_save(world, random.Random(0)) == f"worker {worker.pid}, during a save"
        assert worker.wait(10) == -signal.SIGKILL
    finally:
        gate.write_text("10")
        training.join()
        worker.kill()
