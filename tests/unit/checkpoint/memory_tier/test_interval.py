"""How often the state goes to the memory tier, and that training waits for no copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.unit.checkpoint.helpers import Events, manager
from tests.unit.train.helpers import Replaced, Script, config, write_shards
from tidewheel import jsonlog, storage
from tidewheel.checkpoint.memory_tier.agent import Agent
from tidewheel.checkpoint.memory_tier.client import MemoryTier
from tidewheel.checkpoint.memory_tier.interval import KeepInterval
from tidewheel.checkpoint.memory_tier.replicas import ReplicaSender
from tidewheel.checkpoint.tiers import Placement, TieredCheckpoints
from tidewheel.train.loop import train
from tidewheel.train.runtime import Keeps, NoCheckpoints, Runtime

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TOKEN = "secret"


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    made = [Agent(f"127.0.0.{host}", TOKEN, "interval") for host in (1, 2)]
    yield made
    for agent in made:
        agent.stop()


def tiers(folder: Path, agents: list[Agent], generation: int, **options) -> TieredCheckpoints:
    addresses = tuple(agent.address for agent in agents)
    return TieredCheckpoints(manager(storage.store(folder), Events()), Placement(addresses[:1], addresses[1:], TOKEN),
                             rank=0, world_size=1, generation=generation, on_event=Events(), **options)


@pytest.mark.parametrize(("share", "cost", "expected"), [
    (0.02, 0.02, [1, 2, 3, 4, 5, 6]), (0.02, 0.06, [1, 4]), (0.5, 0.06, [1, 2, 3, 4, 5, 6])])
def test_copies_take_at_most_their_share_of_the_time(share: float, cost: float, expected: list[int]):
    """Steps of a second: a copy of 60 ms is 2 % of three of them."""
    now = 0.0
    interval, kept, costs = KeepInterval("auto", share, clock=lambda: now), [], []
    for step in range(1, 7):
        now += 1.0
        if interval.due(step, costs):
            kept.append(step)
            interval.began()
            costs = [cost, 30.0]  # one slow copy does not count
    assert kept == expected


def test_a_number_of_steps_is_kept_to():
    interval = KeepInterval(3, 0.02)
    interval.began()
    assert [step for step in range(1, 8) if interval.due(step, [1e9])] == [3, 6]
    assert not any(KeepInterval(0, 0.02).due(step, []) for step in range(1, 8))


class Released(Script):
    """A control that lets pushes through after step 6, and kills the worker after step 8."""

    def __init__(self, gate: threading.Event, both: TieredCheckpoints) -> None:
        super().__init__(die=8)
        self._gate, self._both = gate, both

    def progress(self, step: int, steps: int, **metrics: Any) -> None:
        if step == 6:
            self._gate.set()
            self._wait(lambda: self._both.may_keep() and self._both.keeps(7))
        if step == 8:
            self._wait(self._both.may_keep)  # the agent holds step 7
        super().progress(step, steps, **metrics)

    @staticmethod
    def _wait(condition: Callable[[], bool]) -> None:
        until = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < until
            time.sleep(0.001)


def test_steps_do_not_wait_for_a_slow_push(tmp_path, agents, monkeypatch):
    """The push of step 1 ends after step 6: steps 2 to 6 are skipped, step 7 is kept, and its copy is resumed from."""
    write_shards(tmp_path / "shards")
    whole = train(config(tmp_path, "whole", "data.validation=''", "steps=9"), Runtime())
    settings = config(tmp_path, "slow", "data.validation=''", "steps=9", "checkpoint.every_steps=100")
    folder = Path(settings.run_uri) / "checkpoints"
    gate, send = threading.Event(), ReplicaSender.send

    def slow_send(self: ReplicaSender, *arguments: Any) -> Any:
        assert gate.wait(60)
        return send(self, *arguments)

    monkeypatch.setattr(ReplicaSender, "send", slow_send)
    first = tiers(folder, agents, 0, every_steps="auto", share=1.0)
    try:
        with pytest.raises(Replaced):
            train(settings, Runtime(checkpoints=first, control=Released(gate, first)))
        assert first.keeping() == Keeps(step=7, waits=0)
    finally:
        gate.set()
        first.close()
    lines = jsonlog.read(storage.store(settings.run_uri), "metrics.jsonl")
    assert [line["skipped_keeps"] for line in lines] == [0, 0, 1, 2, 3, 4, 5, 5]  # before the step's own copy
    assert [line["kept_step"] for line in lines] == [-1, *[1] * 6, 7]
    assert [line["keep_waits"] for line in lines] == [0] * 8
    second, control = tiers(folder, agents, 1, every_steps="auto"), Script()
    result = train(settings, Runtime(generation=1, checkpoints=second, control=control))
    second.close()
    [resumed] = [detail for kind, detail in control.events if kind == "resume"]
    assert (resumed["step"], resumed["tier"]) == (7, "memory")
    assert result.loss == whole.loss


def test_an_explicit_interval_keeps_each_step_and_waits(tmp_path, agents, monkeypatch):
    write_shards(tmp_path / "shards")
    settings = config(tmp_path, "each", "data.validation=''", "steps=4", "checkpoint.every_steps=100")
    send, wait, waiting = ReplicaSender.send, MemoryTier._await_answer, threading.Semaphore(0)

    def slow_send(self: ReplicaSender, *arguments: Any) -> Any:
        assert waiting.acquire(timeout=60)  # each push ends only once the training waits for it
        return send(self, *arguments)

    def awaited(self: MemoryTier) -> None:
        if self._awaiting_answer:
            waiting.release()
        wait(self)

    monkeypatch.setattr(ReplicaSender, "send", slow_send)
    monkeypatch.setattr(MemoryTier, "_await_answer", awaited)
    both = tiers(Path(settings.run_uri) / "checkpoints", agents, 0, every_steps=1)
    try:
        train(settings, Runtime(checkpoints=both))
        assert both.keeping() == Keeps(step=4, waits=3)
    finally:
        waiting.release()
        both.close()


class Uneven(NoCheckpoints):
    """A memory tier whose second rank cannot keep even steps."""

    def __init__(self) -> None:
        self.kept: list[int] = []
        self._calls = 0

    def has_memory(self) -> bool:
        return True

    def keeps(self, step: int) -> bool:
        assert dist.get_rank() == 0, "rank 0 decides"
        return step != 5

    def may_keep(self) -> bool:
        self._calls += 1
        return dist.get_rank() == 0 or self._calls % 2 == 1

    def keep(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        self.kept.append(step)


def keep_together(folder: Path) -> None:
    checkpoints = Uneven()
    train(config(folder, "together", "data.validation=''", "evaluation.sample_tokens=0"),
          Runtime(dist.get_rank(), 2, checkpoints=checkpoints))
    assert checkpoints.kept == [1, 3, 7]


def test_all_ranks_keep_the_same_steps(tmp_path):
    """Rank 0 leaves out step 5, and rank 1 cannot keep even steps: neither rank keeps any of them."""
    write_shards(tmp_path / "shards")
    on_ranks(2, keep_together, tmp_path)
    lines = jsonlog.read(storage.store(tmp_path / "runs" / "together"), "metrics.jsonl")
    assert lines[-1]["skipped_keeps"] == 3
