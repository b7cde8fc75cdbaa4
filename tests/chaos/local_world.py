"""A run in one process without a cluster, whose process is the driver: cheap, for events that need no nodes."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from tests.chaos.world import SAVE_EVERY, World, faults, supervised
from tidewheel.cluster.local import LocalCluster, NodeHandle
from tidewheel.train.config import TrainConfig


class NoCluster:
    """Takes the place of a cluster: this machine is its node, which no event removes."""

    address = ""
    nodes = (NodeHandle("0" * 56, os.getpid()),)

    def processes(self, node: NodeHandle) -> list[int]:
        """Return the processes of the node that an event may stop."""
        return []


class LocalWorld(World):
    """The run, whose only worker is the driver."""

    def trainers(self) -> dict[int, NodeHandle]:
        pid = self.driver_pid
        return {} if pid is None else {pid: self.cluster.nodes[0]}


@contextlib.contextmanager
def local_run(folder: Path, config: TrainConfig, *, step_seconds: float = 0.0, **environment: str) -> Iterator[World]:
    """Start a run in a process of its own, which ends with the block."""
    with faults(folder, step_seconds, **environment):
        world = LocalWorld(cast(LocalCluster, NoCluster()), config, folder, dict(os.environ),
                           program="tests.chaos.local_driver")
        with supervised(world):
            yield world


def kill_driver_during_save(world: World, rng: random.Random, seconds: float = 3 * SAVE_EVERY) -> str:
    """Kill the driver while a checkpoint has files and no manifest yet, or after `seconds`."""
    checkpoints = Path(world.config.run_uri, "checkpoints")
    past = {folder.name for folder in checkpoints.glob("step_*")}

    def saves() -> bool:
        return any(folder.name not in past and not (folder / "manifest.json").exists()
                   for folder in checkpoints.glob("step_*"))

    caught = world.wait_for(saves, seconds, 0.002)
    world.kill_driver()
    return "during a save" if caught else "no save was seen"


def kill_driver_around_a_round(world: World, rng: random.Random) -> str:
    """Kill the driver up to 0.3 s after a round of its group."""
    assert world.config.outer is not None
    decisions = Path(world.config.outer.store) / "decisions"
    count = len(list(decisions.glob("*.json")))
    world.wait_for(lambda: len(list(decisions.glob("*.json"))) > count, 60, 0.002)
    seconds = rng.choice([0.0, rng.uniform(0.0, 0.3)])
    time.sleep(seconds)
    world.kill_driver()
    return f"{1000 * seconds:.0f} ms after the decision"
