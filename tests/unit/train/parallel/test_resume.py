"""Tests that changes of layout and number of workers do not change a run."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from tests.benchmarks.equivalence import checkpoints, losses, prepare, settings, train_all, weights
from tests.ranks import on_ranks
from tests.unit.train.helpers import Replaced, Script
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.runtime import Runtime

STEPS = 6


def some_steps(config: TrainConfig, generation: int, leave: int) -> None:
    """Continue the run up to step `leave`, where a planned change replaces the workers."""
    control = Script(leave=leave)
    runtime = Runtime(dist.get_rank(), dist.get_world_size(), generation=generation, checkpoints=checkpoints(config),
                      control=control)
    with contextlib.suppress(Replaced):
        train(config, runtime)


def four(folder: Path) -> None:
    some_steps(settings(folder, "moved", STEPS, ["parallel.data=zero3", "parallel.replicate=2"]), 0, leave=2)
    some_steps(settings(folder, "moved", STEPS, ["parallel.data=zero1", "parallel.pipeline=2"]), 1, leave=2)


def test_the_layout_may_change_while_the_run_goes_on(tmp_path: Path):
    prepare(tmp_path)
    still, moved = settings(tmp_path, "still", STEPS, []), settings(tmp_path, "moved", STEPS, [])
    train_all([still])
    on_ranks(4, four, tmp_path)  # two steps as HSDP 2 x 2, two as pipeline 2 x ZeRO-1, the rest in one process
    assert sorted(losses(moved)) == [1, 2, 3, 4]
    train(moved, Runtime(generation=2, checkpoints=checkpoints(moved)))
    assert losses(moved) == pytest.approx(losses(still), rel=1e-5)
    expected = weights(still, still)
    for name, value in weights(moved, still).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-4, err_msg=name)
    audited = audit(moved.run_uri)
    assert audited.ok, audited.summary()
    assert (audited.redone, audited.world_sizes) == (0, (4, 1))
