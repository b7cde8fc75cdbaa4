"""Optimizer state or inputs of blocks on disk: a run killed in the middle of a write goes on from the checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.multiprocessing.spawn import ProcessExitedException

from tests.benchmarks.equivalence import checkpoints, losses, prepare, settings, train_all
from tests.ranks import on_ranks
from tests.unit.train.helpers import Replaced, Script
from tidewheel.checkpoint.digest import digest
from tidewheel.errors import ConfigError
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.memory import scratch_file
from tidewheel.train.parallel.mesh import close_own_group
from tidewheel.train.runtime import Runtime

STEPS, KILLED_AT = 6, 5
SAVES = ["checkpoint.every_steps=2", "checkpoint.memory_tier.every_steps=0"]


def offloaded(folder: Path, name: str) -> TrainConfig:
    return settings(folder, name, STEPS, [*SAVES, "parallel={data: zero3, offload: true}",
                                          f"memory.optimizer_disk={folder / 'disk'}"])


@pytest.fixture(autouse=True)
def no_group_stays() -> Iterator[None]:
    yield
    close_own_group()


def inputs_on_disk(folder: Path, name: str) -> TrainConfig:
    return settings(folder, name, STEPS, [*SAVES, "memory.activation_checkpointing=offload",
                                          f"memory.activation_disk={folder / 'disk'}"])


WRITES = {offloaded: 1, inputs_on_disk: 8}
"""How often a step writes each place: once, or for each micro-batch."""


def dies_while_it_writes(config: TrainConfig, folder: Path, nth: int) -> None:
    """Train, and die by SIGKILL when half of a block is written, at the n-th write to a place."""
    original, writes = scratch_file._write, []

    def half(handle: int, place: int, data: memoryview, where: Path) -> None:
        writes.append(place)
        if writes.count(place) == nth:
            os.pwrite(handle, data[:len(data) // 2 // scratch_file.ALIGNMENT * scratch_file.ALIGNMENT], place)
            (folder / "killed").write_text(str(len(writes)))
            os.kill(os.getpid(), signal.SIGKILL)
        original(handle, place, data, where)

    scratch_file._write = half
    train(config, Runtime(checkpoints=checkpoints(config)))


@pytest.mark.parametrize("on_disk", WRITES)
def test_a_kill_in_the_middle_of_a_write_loses_nothing(on_disk: Callable[[Path, str], TrainConfig], tmp_path: Path):
    prepare(tmp_path)
    still, killed = settings(tmp_path, "still", STEPS, SAVES), on_disk(tmp_path, "killed")
    train_all([still])
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        on_ranks(1, dies_while_it_writes, killed, tmp_path, KILLED_AT * WRITES[on_disk])
    assert (tmp_path / "killed").exists(), "it died inside a write"
    assert os.listdir(tmp_path / "disk") == [], "its file is gone with it"
    assert max(losses(killed)) < KILLED_AT
    train(killed, Runtime(generation=1, checkpoints=checkpoints(killed)))
    assert losses(killed) == losses(still)
    assert digest(killed.run_uri).state == digest(still.run_uri).state
    assert os.listdir(tmp_path / "disk") == []


def some_steps(config: TrainConfig, generation: int, leave: int) -> None:
    """Go on up to step `leave`, where a planned change ends the generation."""
    with contextlib.suppress(Replaced):
        train(config, Runtime(generation=generation, checkpoints=checkpoints(config), control=Script(leave=leave)))


def test_the_state_may_move_to_disk_and_back_in_a_run(tmp_path: Path):
    prepare(tmp_path)
    still = settings(tmp_path, "still", STEPS, SAVES)
    train_all([still])
    in_memory = settings(tmp_path, "moved", STEPS, SAVES)
    some_steps(in_memory, 0, leave=2)
    some_steps(offloaded(tmp_path, "moved"), 1, leave=2)
    assert sorted(losses(in_memory)) == [1, 2, 3, 4]
    some_steps(in_memory, 2, leave=-1)
    assert losses(in_memory) == losses(still)
    assert digest(in_memory.run_uri).state == digest(still.run_uri).state


@pytest.mark.parametrize(("changes", "told"), [
    (["memory.optimizer_disk=/tmp"], "nearest legal choice: parallel.offload true"),
    (["parallel={data: zero3, offload: true}", "memory.optimizer_disk=/disk"], "checkpoint.memory_tier.every_steps 0"),
    (["parallel={data: zero3, offload: true}", "memory.optimizer_disk=disk"], "nearest legal choice: /disk"),
    (["parallel={data: zero3, offload: true}", "memory.optimizer_disk=s3://bucket/a"], "choice: /bucket/a")])
def test_settings_that_are_refused(tmp_path: Path, changes: list[str], told: str):
    with pytest.raises(ConfigError, match=told):
        settings(tmp_path, "run", STEPS, changes)
