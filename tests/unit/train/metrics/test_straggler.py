"""Who is named as slow, as a function of the readings, and in processes of which one works longer."""

from __future__ import annotations

import time

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks import on_ranks
from tidewheel.train.collectives import Collectives
from tidewheel.train.metrics.config import StragglerConfig
from tidewheel.train.metrics.measure import BusyTime, host_resident_bytes
from tidewheel.train.metrics.straggler import Stragglers, stragglers
from tidewheel.train.runtime import Runtime


@given(st.lists(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4), min_size=1, max_size=5))
def test_named_is_who_is_over_in_every_reading(rows: list[list[float]]):
    results = {item.rank for item in stragglers(torch.tensor(rows, dtype=torch.float64), 0.2)}
    for rank in range(4):
        over = []
        for row in rows:
            ordered = sorted(row)
            over.append(row[rank] > 1.2 * ordered[1])
        assert (rank in results) == all(over)


class Scripted(Collectives):
    """Gathers what a script says."""

    def __init__(self, script: list[list[float]]) -> None:
        super().__init__(Runtime())
        self.world_size, self._script = 3, iter(script)

    def gather_all(self, values: torch.Tensor) -> torch.Tensor | None:
        unknown = [-1, -1, -1]
        return torch.tensor([[int(seconds * 1e9), *unknown] for seconds in next(self._script)]).flatten()


def test_a_rank_is_named_once_and_again_when_it_comes_back():
    readings = [[1.0, 1.0, 2.0], [1.0, 1.0, 1.1], [1.0, 1.0, 2.0], [1.0, 1.05, 1.5], [1.0, 1.0, 1.6], [1.0, 1.0, 1.1],
                [1.0, 1.0, 1.0], [1.0, 2.0, 1.0], [1.0, 2.0, 1.0]]
    watch = Stragglers(StragglerConfig(every_steps=2, window=2), Scripted(readings))
    events = [watch.step(0.0) for _ in range(1 + 2 * len(readings))]
    reported = {number: event for number, found in enumerate(events) for event in found}
    assert [(number, kind, detail["slow_rank"]) for number, (kind, detail) in reported.items()] == [
        (8, "straggler", 2), (12, "straggler_over", 2), (18, "straggler", 1)]
    assert watch.reading() == [1.0, 2.0, 1.0]
    assert watch.reading() == []
    assert reported[8][1] == {"slow_rank": 2, "own_seconds": 1.75, "median_seconds": 1.025, "over": 0.707}
    watch.close()


def test_a_slow_worker_is_one_far_over():
    readings = [[1.0, 1.0, 1.4], [1.0, 1.0, 1.4], [1.0, 1.0, 3.0], [1.0, 1.0, 2.8], [1.0, 1.0, 1.4]]
    watch = Stragglers(StragglerConfig(every_steps=1, window=2), Scripted(readings), slow_factor=2.5)
    reported = [[kind for kind, _ in watch.step(0.0)] for _ in range(1 + len(readings))]
    assert reported == [[], [], ["straggler"], [], ["slow_worker"], ["slow_worker_over"]]
    watch.close()


def test_of_two_ranks_the_faster_one_is_the_median():
    [slow] = stragglers(torch.tensor([[1.0, 3.0]]), 0.2)
    assert (slow.rank, slow.over) == (1, 2.0)


def test_alone_or_turned_off_nothing_is_gathered():
    assert Stragglers(StragglerConfig(), Collectives(Runtime())).step(1.0) == []
    assert Stragglers(StragglerConfig(every_steps=0), Scripted([])).step(1.0) == []


def test_sleep_is_no_work():
    busy, slept = BusyTime(), []
    for _ in range(4):
        time.sleep(0.1)
        slept.append(busy.seconds())  # with the wait for a CPU afterwards
    until = time.thread_time() + 0.2
    while time.thread_time() < until:
        pass
    worked = busy.seconds()
    busy.close()
    assert min(slept) < 0.05
    assert worked >= 0.19
    assert 1e7 < host_resident_bytes() < 1e11


def _steps() -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    collectives = Collectives(Runtime(rank=rank, world_size=3))
    watch = Stragglers(StragglerConfig(every_steps=3, window=2), collectives)
    BusyTime.path = ""  # running time alone: tests share their CPUs with others
    reported = []
    for _ in range(7):
        until = time.thread_time() + (0.06 if rank == 1 else 0.02)
        while time.thread_time() < until:
            pass
        collectives.sum(torch.zeros(1, dtype=torch.float64))  # where the others wait for it
        reported += watch.step(0.0)
    watch.close()
    assert [(kind, detail["slow_rank"]) for kind, detail in reported] == ([("straggler", 1)] if rank == 0 else [])


def test_the_rank_that_works_is_named_not_those_that_wait():
    on_ranks(3, _steps)
