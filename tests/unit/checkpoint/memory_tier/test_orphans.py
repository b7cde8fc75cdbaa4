"""What agents do with what a run has left: keep the newest whole step, upload it, let go; and give way to workers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.checkpoint.helpers import equal, manager, state
from tidewheel import jsonlog
from tidewheel.checkpoint.memory_tier import orphan_upload
from tidewheel.checkpoint.memory_tier.agent import Agent
from tidewheel.checkpoint.memory_tier.client import MemoryTier
from tidewheel.checkpoint.memory_tier.inventory import ask
from tidewheel.checkpoint.memory_tier.part_reader import PartReader
from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.checkpoint.memory_tier.restore import candidates, inventory
from tidewheel.checkpoint.memory_tier.slots import REPLICA_SLOTS, SLOTS_PER_WORKER
from tidewheel.checkpoint.verify import list_checkpoints
from tidewheel.elastic.agent_supervisor import AgentSupervisor
from tidewheel.elastic.agents import Agents
from tidewheel.storage import Store, store

TOKEN, NEVER = "secret", 1e6


class Cluster:
    """Agents of two nodes, and one worker at a time on the first."""

    def __init__(self, folder: Path, upload_seconds: float) -> None:
        self.folder = folder / "checkpoints"
        self.agents = [Agent(f"127.0.0.{host}", TOKEN, "orphans", upload_seconds=upload_seconds) for host in (1, 2)]

    def keep(self, *steps: int, generation: int = 0) -> MemoryTier:
        own, other = (agent.address for agent in self.agents)
        tier = MemoryTier({0: own}, own, [other], 0, 1, TOKEN, generation=generation, checkpoints=str(self.folder))
        for step in steps:
            tier.snapshot(step, state(step), {"step": step})
            assert tier.flush()
        return tier

    def held(self) -> list[tuple[int, int]]:
        parts = inventory([agent.address for agent in self.agents], TOKEN)
        return sorted((one.generation, one.step) for one in candidates(parts))

    def slots(self) -> int:
        """Files of shared memory that exist."""
        return sum(len(list(agent.store.folder.glob("slot-*"))) for agent in self.agents)

    def committed(self) -> list[int]:
        return [info.step for info in list_checkpoints(store(self.folder)) if info.complete]

    def events(self) -> list[dict[str, Any]]:
        return jsonlog.read(store(self.folder.parent), "events.jsonl")

    def abandon(self) -> None:
        for agent in self.agents:
            ask(agent.address, TOKEN, {"op": "abandon"})

    def end(self) -> None:
        for agent in self.agents:
            agent.stop()


class Looks:
    """Counts how often each agent of a cluster has looked whether to upload, and waits for more of these."""

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        self._counts = Counter[Any]()
        self._agents = cluster.agents
        check = orphan_upload.OrphanUpload.check

        def counted(upload: orphan_upload.OrphanUpload, agent: Agent, active: bool) -> None:
            check(upload, agent, active)
            self._counts[agent.address] += 1

        monkeypatch.setattr(orphan_upload.OrphanUpload, "check", counted)

    def wait(self, count: int) -> None:
        """Wait until each agent has looked `count` more times."""
        before = Counter(self._counts)
        until(lambda: all(self._counts[agent.address] >= before[agent.address] + count for agent in self._agents))


class Gate:
    """Uploads read no further while it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        read = PartReader.read

        def gated(reader: PartReader, start: int, end: int) -> memoryview:
            self.reached.set()
            assert self.open.wait(60)
            return read(reader, start, end)

        monkeypatch.setattr(PartReader, "read", gated)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(tmp_path, getattr(request, "param", 0.5))
    yield made
    made.end()


def test_all_but_the_newest_step_goes_at_once_and_that_goes_when_it_is_in_storage(cluster, monkeypatch):
    gate = Gate(monkeypatch)
    worker = cluster.keep(1, 2, 3, 4)
    assert cluster.slots() == SLOTS_PER_WORKER + REPLICA_SLOTS
    worker.close()
    assert gate.reached.wait(60)
    assert cluster.held() == [(0, 4)]
    assert cluster.slots() == 2  # its own, and the replica on the other node
    assert cluster.committed() == []
    gate.open.set()
    until(lambda: all(agent.stopped.is_set() for agent in cluster.agents))
    until(lambda: not cluster.slots())
    assert cluster.committed() == [4]
    filled = state(99)
    assert manager(store(cluster.folder)).load_latest(filled) == {"step": 4}
    assert equal(filled, state(4))


@pytest.mark.parametrize("cluster", [NEVER], indirect=True)
def test_a_driver_that_ends_lets_its_agents_go_without_a_wait(cluster, monkeypatch):
    looks = Looks(cluster, monkeypatch)
    worker = cluster.keep(1, 2)
    cluster.abandon()
    looks.wait(2)
    assert cluster.slots() == SLOTS_PER_WORKER + REPLICA_SLOTS, "a worker is still there"
    worker.close()
    until(lambda: all(agent.stopped.is_set() for agent in cluster.agents))
    assert cluster.committed() == [2]


@pytest.mark.parametrize("cluster", [NEVER], indirect=True)
def test_what_is_in_storage_already_is_not_uploaded_again(cluster):
    saved = manager(store(cluster.folder))
    saved.save(2, state(2), {"step": 2})
    saved.wait()
    cluster.keep(1, 2).close()
    cluster.abandon()
    until(lambda: all(agent.stopped.is_set() for agent in cluster.agents))
    assert cluster.committed() == [2]
    assert not cluster.folder.parent.joinpath("events.jsonl").exists()


def test_an_upload_stops_when_workers_come_back(cluster, monkeypatch):
    gate = Gate(monkeypatch)
    cluster.keep(1, 2).close()
    assert gate.reached.wait(60)
    back = cluster.keep(3, generation=1)
    gate.open.set()
    until(lambda: any(event["kind"] == "upload_failed" for event in cluster.events()))
    assert "generation 1 is at work" in cluster.events()[-1]["detail"]["reason"]
    assert cluster.committed() == []
    assert cluster.held()[-1] == (1, 3)
    back.close()
    until(lambda: cluster.committed() == [3])  # and when those are gone too it is done


def test_an_upload_stops_when_a_newer_generation_asks_what_there_is(cluster, monkeypatch):
    """Its workers are on their way: none has opened slots yet."""
    gate = Gate(monkeypatch)
    cluster.keep(1, 2).close()
    assert gate.reached.wait(60)
    inventory([cluster.agents[1].address], TOKEN, generation=1_000_000)  # only the other node's agent hears of it
    gate.open.set()
    until(lambda: any(event["kind"] == "upload_failed" for event in cluster.events()))
    assert "workers are back" in cluster.events()[-1]["detail"]["reason"]
    assert cluster.committed() == []
    assert cluster.held() == [(0, 2)]
    assert not any(agent.stopped.is_set() for agent in cluster.agents)


def test_what_is_being_loaded_is_not_taken_away(cluster, monkeypatch):
    looks = Looks(cluster, monkeypatch)
    cluster.keep(1, 2).close()
    result = candidates(inventory([agent.address for agent in cluster.agents], TOKEN, generation=1))[0]
    reader = PartReader(result.copies[0], TOKEN, None)
    reader.describe()
    looks.wait(3)  # a second apart: much longer than `upload_seconds`
    assert cluster.held() == [(0, 1), (0, 2)]
    reader.close()
    until(lambda: cluster.committed() == [2])


def test_an_agent_that_cannot_upload_does_not_stand_in_the_way(cluster):
    """The node of the lowest address had no worker of its own, only copies: it does not know where checkpoints go."""
    own_agent, other = (agent.address for agent in reversed(cluster.agents))
    assert other < own_agent
    tier = MemoryTier({0: own_agent}, own_agent, [other], 0, 1, TOKEN, checkpoints=str(cluster.folder))
    tier.snapshot(1, state(1), {"step": 1})
    assert tier.flush()
    tier.close()
    until(lambda: all(agent.stopped.is_set() for agent in cluster.agents))
    assert cluster.committed() == [1]


@pytest.mark.parametrize("over", [True, False])
def test_the_supervisor_tells_the_agents_how_the_run_has_ended(over, monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(Agents, "stop", lambda self: calls.append("stop"))
    monkeypatch.setattr(Agents, "abandon", lambda self: calls.append("abandon"))
    AgentSupervisor(Agents("run")).end(over=over)
    assert calls == ["stop" if over else "abandon"]


@pytest.mark.parametrize(("end", "function"), [(Agents.stop, "protocol.connect"), (Agents.abandon, "inventory.ask")])
def test_agents_are_told_of_the_end_at_the_same_time(end, function, monkeypatch):
    """A few nodes that do not answer must not keep the driver from the others: it waits a few seconds for all."""
    together = threading.Barrier(8, timeout=30)
    told = []

    def frozen(*_, **__):
        together.wait()
        told.append(1)
        raise OSError("timed out")

    monkeypatch.setattr(f"tidewheel.checkpoint.memory_tier.{function}", frozen)
    monkeypatch.setattr("tidewheel.checkpoint.memory_tier.slots.sweep", list)
    agents = Agents("run")
    agents._addresses = {f"node {number}": Address("h", number) for number in range(8)}
    ended = SimpleNamespace(close_log=SimpleNamespace(remote=lambda: None))
    agents._actors = dict.fromkeys(agents._addresses, ended)
    monkeypatch.setattr("ray.wait", lambda *_, **__: ([], []))
    monkeypatch.setattr("ray.kill", lambda actor: None)
    with contextlib.suppress(OSError):  # the real `ask` raises none
        end(agents)
    assert len(told) == 8


def test_an_error_without_a_message_is_reported_and_the_agent_tries_again(cluster, monkeypatch):
    """`str(OSError())` has no lines. The thread that watches for orphans died of that, so the agent never ended."""
    real, failures = orphan_upload.newest_committed, [1]

    def fail_once(checkpoints: Store) -> tuple[int, int]:
        if failures:
            failures.pop()
            raise OSError
        return real(checkpoints)

    monkeypatch.setattr(orphan_upload, "newest_committed", fail_once)
    cluster.keep(1, 2).close()
    until(lambda: cluster.committed() == [2])
    reasons = [event["detail"]["reason"] for event in cluster.events() if event["kind"] == "upload_failed"]
    assert "OSError" in reasons
