"""Recovery on a backend that fails as NCCL does: no value of an aborted collective is believed."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests import nccl_like
from tests.ranks import multiprocessing as _preloaded  # noqa: F401  the fork server that has imported torch
from tests.unit.train.helpers import config, write_shards
from tidewheel import jsonlog
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.verify import list_checkpoints
from tidewheel.elastic.process_group import GenerationGroup, serve_store
from tidewheel.train.collectives import Collectives
from tidewheel.train.cuda_environment import (
    ALLOCATOR,
    ERROR_HANDLING,
    OLD_ALLOCATOR,
    SHARED_INDEX,
    prepare_environment,
)
from tidewheel.train.guards.config import GuardsConfig
from tidewheel.train.guards.hang import HangError, Watch
from tidewheel.train.logs.line import HERE
from tidewheel.train.loop import train
from tidewheel.train.run import Run
from tidewheel.train.runtime import AbortedError, Runtime


def opened(rank: int, port: int, generation: int, world_size: int) -> tuple[GenerationGroup, Collectives]:
    group = GenerationGroup()
    group.open(("127.0.0.1", port), generation, rank, world_size, "cpu")
    assert world_size == 1 or dist.get_backend() == nccl_like.NAME
    return group, Collectives(Runtime(rank=rank, world_size=world_size, group=group))


def lose_a_rank(rank: int, port: int, prepared: bool, answers: Any) -> None:
    """Reduce once; then rank 1 of 2 ends, and rank 0 is told to break off its group and goes on alone."""
    torch.set_num_threads(1)
    os.environ.pop(ERROR_HANDLING, None)
    if prepared:
        prepare_environment()
    nccl_like.install()
    group, collectives = opened(rank, port, 1, 2)
    first = collectives.to_host(collectives.sum(torch.ones(2, dtype=torch.float64))).tolist()
    if rank == 1:
        os._exit(0)
    threading.Timer(0.5, group.break_off).start()
    values = collectives.sum(torch.ones(2, dtype=torch.float64))  # does not raise: it holds garbage
    try:
        believed: Any = collectives.to_host(values).tolist()
    except AbortedError as error:
        believed = str(error)
    group.close()
    group, collectives = opened(0, port, 2, 1)
    answers.put((first, values.tolist(), believed, dist.is_initialized(), collectives.from_first(7)))
    group.close()


def wait_in_vain(rank: int, port: int, over: Any, answers: Any) -> None:
    """Rank 1 of 2 lives but never joins a collective; the watch of rank 0 aborts it and names rank 1."""
    torch.set_num_threads(1)
    prepare_environment()
    nccl_like.install()
    group, collectives = opened(rank, port, 1, 2)
    watch = Watch(GuardsConfig(collective_timeout_seconds=2, start_timeout_seconds=2), rank, 2,
                  break_off=group.break_off)
    watch.mark(1, "step")
    if rank == 1:
        over.wait(100)
        os._exit(0)
    try:
        collectives.to_host(collectives.sum(torch.ones(2, dtype=torch.float64)))
    except AbortedError as error:
        explained = watch.explained(error)
        answers.put((type(explained) is HangError, getattr(explained, "ranks", ()), str(explained)))
    watch.close()
    group.close()
    over.set()


def start(function: Any, *arguments: Any) -> list[Any]:
    context = mp.get_context("forkserver")
    store = serve_store("127.0.0.1")
    ranks = [context.Process(target=function, args=(rank, store.port, *arguments), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(200)
    return [process.exitcode for process in ranks]


def test_a_survivor_believes_nothing_that_an_aborted_collective_leaves():
    answers = mp.get_context("forkserver").SimpleQueue()
    assert start(lose_a_rank, True, answers) == [0, 0]
    first, garbage, believed, in_a_group, alone = answers.get()
    assert first == [2.0, 2.0]
    assert garbage == [nccl_like.GARBAGE] * 2
    assert "process group was broken off" in believed
    assert not in_a_group
    assert alone == 7


def test_with_torchs_default_the_survivor_would_end():
    answers = mp.get_context("forkserver").SimpleQueue()
    assert start(lose_a_rank, False, answers) == [nccl_like.EXIT_CODE, 0]


def test_a_collective_that_waits_in_vain_is_aborted_and_explained():
    context = mp.get_context("forkserver")
    answers = context.SimpleQueue()
    assert start(wait_in_vain, context.Event(), answers) == [0, 0]
    is_hang, ranks, text = answers.get()
    assert is_hang
    assert ranks == (1,)
    assert "rank 1 is still at step 1" in text


class BrokenAtStep5:
    """A group that is broken off during step 5."""

    def is_whole(self) -> bool:
        return HERE.step < 5

    def break_off(self) -> None:
        return


def test_a_step_of_a_broken_group_is_neither_recorded_nor_saved(tmp_path):
    write_shards(tmp_path / "shards", rows=64)
    write_shards(tmp_path / "validation", shards=1, rows=11, seed=1)
    settings = config(tmp_path, "run", "steps=8", "checkpoint.every_steps=1")
    run = Run.open(settings)
    manager = CheckpointManager(run.checkpoints, asynchronous=False)
    with pytest.raises(AbortedError):
        train(run, Runtime(group=BrokenAtStep5(), checkpoints=manager))
    assert [row["step"] for row in jsonlog.read(run.store, "batches.jsonl")] == [1, 2, 3, 4]
    assert max(found.step for found in list_checkpoints(run.checkpoints) if found.complete) == 4


@pytest.mark.parametrize("given", [{}, {ERROR_HANDLING: "3"}, {ALLOCATOR: "max_split_size_mb:64"},
                                   {OLD_ALLOCATOR: "max_split_size_mb:64"}])
def test_workers_get_the_variables_that_torch_asks_for(given, caplog):
    environment = dict(given)
    prepare_environment(environment)
    assert environment[ERROR_HANDLING] == "0"
    assert ("is replaced by 0" in caplog.text) == (ERROR_HANDLING in given)
    assert environment[SHARED_INDEX] == "1"
    own = given.get(ALLOCATOR) or given.get(OLD_ALLOCATOR)
    assert (environment.get(ALLOCATOR) or environment[OLD_ALLOCATOR]) == (own or "expandable_segments:True")
