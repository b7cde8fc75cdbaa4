"""Events of the chaos programs find what they wait for in a run that stands still at its gate."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos import events
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
