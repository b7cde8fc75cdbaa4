import threading
import time
from dataclasses import replace
from queue import SimpleQueue
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from tests.agent_addresses import AgentAddresses
from tidewheel import jsonlog
from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.commit_log import CommitLog
from tidewheel.elastic.agent_supervisor import AgentSupervisor
from tidewheel.elastic.client import Client
from tidewheel.elastic.coordinator import Coordinator, actor_name
from tidewheel.elastic.generation import Generation
from tidewheel.elastic.messages import (
    Abort,
    AgentTable,
    Beat,
    ExitReason,
    Hello,
    Join,
    Left,
    MemoryPlacement,
    Over,
    StepDone,
    WorkerEvent,
)
from tidewheel.elastic.node_watch import NodeChanges
from tidewheel.elastic.placement_orders import PlacementOrders
from tidewheel.errors import OwnershipError
from tidewheel.ownership import Timing, acquire
from tidewheel.storage import store
from tidewheel.train.elastic_config import ElasticConfig
from tidewheel.train.history import RunHistory


def coordinator_of(folder, *arguments):
    """Return the coordinator of a driver that has acquired the run."""
    return Coordinator(str(folder), *arguments, epoch=acquire(store(folder)).epoch)


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(Coordinator, "_watch", lambda self: None)


def test_a_new_driver_continues_the_numbers_of_the_run(tmp_path, quiet):
    first = coordinator_of(tmp_path)
    first.event("resume", {"generation": 0, "step": 0})
    first.event("failure", {"generation": 1})
    first.start("127.0.0.1")
    (tmp_path / "batches.jsonl").write_text('{"step": 7}\n{"step": 8}\n')
    with pytest.raises(OwnershipError, match="being trained by"):
        acquire(store(tmp_path), times=Timing(0.1, 60.0))
    first.end()
    CommitLog(store(tmp_path).child("checkpoints")).release(0)
    second = coordinator_of(tmp_path)
    second.start("127.0.0.1")
    endpoint = second.endpoint()
    assert not endpoint.runs
    second.expect({"a": "n"}, True)
    received = SimpleQueue()
    client = Client(endpoint.address, Hello("a", "n", endpoint.token), received.put, print)
    order = received.get(timeout=60)
    assert replace(order, past=None) == Join(1_000_000, 0, 1)
    assert replace(order.past, time=0.0) == RunHistory(step=8, failures=1, generation=1_000_000)
    assert second.snapshot().generation == 1_000_000
    client.send(StepDone(1_000_000, 9, 10, {"loss": 1.0}))
    client.send(Left(1_000_000, ExitReason.FINISHED))
    assert received.get(timeout=60) == Over()
    assert second.snapshot().progress == {"step": 9, "steps": 10, "loss": 1.0}
    client.close()
    second.end()
    kinds = [event["kind"] for event in jsonlog.read(store(tmp_path), "events.jsonl")]
    assert kinds == ["driver_start", "resume", "failure", "driver_start"]
    state = store(tmp_path).read_json("state.json")
    assert (state["step"], state["failures"], state["generation"]) == (9, 1, 1_000_000)


def test_workers_get_the_table_of_agents_once(tmp_path, quiet):
    """At 16,000 workers one table for each of them is most of what a coordinator sends after a death."""
    coordinator = coordinator_of(tmp_path, ElasticConfig(max_workers=3), (1, 2, 3))
    coordinator._agents.supervisor = AgentSupervisor(AgentAddresses())
    coordinator.start("127.0.0.1")
    coordinator.expect({"a": "m", "b": "n", "c": "n"}, True)
    endpoint = coordinator.endpoint()
    received = {name: SimpleQueue() for name in "abc"}
    clients = {name: Client(endpoint.address, Hello(name, node, endpoint.token), received[name].put, print)
               for name, node in (("a", "m"), ("b", "n"), ("c", "n"))}
    first = {name: received[name].get(timeout=60).memory for name in "abc"}
    assert all(sorted(memory.agents.addresses) == [("m", 1), ("n", 1)] for memory in first.values())
    coordinator.dead(["b"], "its actor died")
    for name in "ac":
        assert received[name].get(timeout=60) == Abort(0)
        clients[name].send(Left(0, ExitReason.FAILED, "connection closed"))
    again = {name: received[name].get(timeout=60).memory for name in "ac"}
    assert all(memory.agents is None for memory in again.values())
    assert sum(nodes * ranks for _, nodes, ranks in again["a"].ranks) == 2
    coordinator.end()


def memory_of(placements: PlacementOrders, *names: str) -> list[Any]:
    """Return what these workers get, in alphabetical order."""
    given = {name: placement for placement, ranks in placements.of(dict.fromkeys(names, 0)) for name in ranks}
    return [given[name] for name in sorted(names)]


def test_a_table_is_sent_again_if_an_agent_or_a_process_is_new():
    placements = PlacementOrders()
    table = AgentTable((Address("m", 1), Address("n", 1)), {}, "secret")
    placements.begin(MemoryPlacement(table, ((0, 2, 1),)), {"a", "b"})
    assert [memory.agents for memory in memory_of(placements, "a")] == [table]
    assert [memory.agents for memory in memory_of(placements, "a", "b")] == [None, table]
    placements.begin(MemoryPlacement(replace(table), ((0, 1, 1),)), {"a"})  # an equal one
    assert memory_of(placements, "a")[0].agents is None
    placements.forget("a")
    assert [memory.agents for memory in memory_of(placements, "a", "b")] == [table, table]
    more = replace(table, addresses=(*table.addresses, Address("o", 1)))
    placements.begin(MemoryPlacement(more, ((0, 3, 1),)), {"a", "b"})
    assert [memory.agents for memory in memory_of(placements, "a", "b")] == [more, more]
    placements.begin(None, {"a", "b"})
    assert memory_of(placements, "a") == [None]


def test_an_unauthenticated_worker_is_refused(tmp_path, quiet):
    coordinator = coordinator_of(tmp_path)
    coordinator.start("127.0.0.1")
    closed = Event()
    coordinator.expect({"a": "n"}, True)
    Client(coordinator.endpoint().address, Hello("a", "n", "guessed"), print, closed.set)
    assert closed.wait(60)
    assert coordinator.snapshot().generation == -1
    coordinator.end()


def test_a_connected_worker_that_ray_reports_dead_is_cut_off(tmp_path, quiet):
    """Its raylet was killed and the worker was not: the coordinator cuts it off, and it ends itself."""
    coordinator = coordinator_of(tmp_path)
    coordinator.start("127.0.0.1")
    endpoint = coordinator.endpoint()
    closed = Event()
    received = SimpleQueue()
    coordinator.expect({"a": "n"}, True)
    Client(endpoint.address, Hello("a", "n", endpoint.token), received.put, closed.set)
    assert received.get(timeout=60).type == "join"
    assert coordinator.dead(["a", "unknown"], "its actor died") == ["a"]
    assert closed.wait(60)
    assert coordinator.fenced() == {"a"}
    coordinator.end()


def test_a_worker_that_dies_before_it_connects_disturbs_nobody(tmp_path, quiet):
    """It was killed while it imported torch, beside workers that train: their group must not fail."""
    coordinator = coordinator_of(tmp_path)
    coordinator.start("127.0.0.1")
    endpoint = coordinator.endpoint()
    received = SimpleQueue()
    coordinator.expect({"a": "n"}, True)
    client = Client(endpoint.address, Hello("a", "n", endpoint.token), received.put, print)
    assert received.get(timeout=60).type == "join"
    coordinator.expect({"b": "n"}, False)
    assert coordinator.dead(["b"], "its process has ended") == ["b"]
    assert received.empty()
    assert coordinator.fenced() == {"b"}
    client.send(Left(0, ExitReason.FINISHED, ""))
    coordinator.end()


def test_a_worker_that_is_lost_while_it_waits_for_its_nodes_agent_gets_no_rank(tmp_path, quiet, monkeypatch):
    """Its machine is gone, and with it the agent that the worker waits for: nobody would answer as its rank."""
    monkeypatch.setattr("tidewheel.elastic.lobby.AGENT_SECONDS", 0.3)
    coordinator = coordinator_of(tmp_path)
    coordinator._agents.supervisor = AgentSupervisor(NoAgents())
    coordinator.start("127.0.0.1")
    endpoint = coordinator.endpoint()
    closed = Event()
    coordinator.expect({"a": "n"}, True)
    client = Client(endpoint.address, Hello("a", "n", endpoint.token), print, closed.set)
    until = time.monotonic() + 60
    while not client.welcomed:
        assert time.monotonic() < until
        time.sleep(0.01)
    coordinator._decide(lambda: coordinator._dispatcher.nodes_changed(NodeChanges((), {"n": "host"}, {})))
    assert closed.wait(60)
    time.sleep(1)
    assert coordinator.snapshot().generation == -1
    assert not coordinator._membership.workers
    coordinator.end()


def test_agents_are_started_again_after_ray_did_not_answer(tmp_path, quiet):
    """Ray's control store was away for a moment. The thread that starts agents must outlive that."""
    agents = AwayAtFirst()
    events = SimpleQueue()
    supervisor = AgentSupervisor(agents, lambda kind, detail: events.put((kind, detail["where"])))
    supervisor.want(["m"])
    assert events.get(timeout=60) == ("control_error", "agents")
    until = time.monotonic() + 60
    while not supervisor.has("m"):
        assert time.monotonic() < until
        time.sleep(0.01)
    supervisor.end(over=True)


def test_agents_of_nodes_whose_workers_are_all_cut_off_are_looked_for_again(tmp_path, quiet):
    """The node may be stopped, and its agent with it. A node that still has a worker keeps its agent."""
    lost = []
    coordinator = coordinator_of(tmp_path, ElasticConfig(max_workers=3), (1, 2, 3))
    coordinator._agents.supervisor = AgentSupervisor(AgentAddresses())
    coordinator._agents.supervisor.lost = lambda node, for_good: lost.append((node, for_good))
    coordinator.start("127.0.0.1")
    coordinator.expect({"a": "m", "b": "n", "c": "n"}, True)
    coordinator.dead(["b"], "its actor died")
    coordinator._decide(coordinator._dispatcher.tick)
    assert lost == []
    coordinator.dead(["a", "c"], "their actors died")
    coordinator._decide(coordinator._dispatcher.tick)
    assert sorted(lost) == [("m", False), ("n", False)]
    coordinator.end()


class NoAgents(AgentAddresses):
    """No agent ever answers."""

    def on(self, nodes, seconds):
        return {}


class AwayAtFirst(AgentAddresses):
    """Agents of a Ray cluster whose control store does not answer the first call."""

    asked = 0

    def on(self, nodes, seconds):
        self.asked += 1
        if self.asked == 1:
            raise OSError("the control store does not answer")
        return super().on(nodes, seconds)


class Workers:
    """Workers as the coordinator sees them: each has a connection and sends beats."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.endpoint = coordinator.endpoint()
        self.clients, self.received, self.ended = {}, {}, {}
        self.generation, self.frozen = {}, set()
        threading.Thread(target=self._beat, daemon=True).start()

    def come(self, *names: str) -> None:
        for name in names:
            self.received[name] = SimpleQueue()
            self.ended[name] = Event()
            hello = Hello(name, f"node of {name}", self.endpoint.token)
            self.clients[name] = Client(self.endpoint.address, hello, self.received[name].put, self.ended[name].set)

    def receive(self, name: str, message_type: str) -> None:
        """Wait for a worker's next message, and assert its type."""
        order = self.received[name].get(timeout=60)
        assert order.type == message_type
        self.generation[name] = order.generation

    def _beat(self) -> None:
        while True:
            for name, client in list(self.clients.items()):
                if name not in self.frozen:
                    client.send(Beat(self.generation.get(name, -1), 7))
            time.sleep(0.25)


@pytest.fixture
def full(tmp_path, quiet, monkeypatch):
    """Yield the coordinator of a run of up to three workers, and a function that fills and empties the run's disk."""
    monkeypatch.setattr("tidewheel.elastic.process_group.serve_store", lambda host: SimpleNamespace(port=1))
    elastic = ElasticConfig(min_workers=1, max_workers=3, join_wait_seconds=0.1, resize_interval_seconds=0.1)
    coordinator = coordinator_of(tmp_path, elastic, (1, 2, 3))
    coordinator.start("127.0.0.1")
    events = tmp_path / "events.jsonl"

    def fill(is_full: bool) -> None:
        if is_full:
            events.rename(tmp_path / "kept")
            events.symlink_to("/dev/full")
        else:
            events.unlink()
            (tmp_path / "kept").rename(events)

    yield coordinator, fill
    coordinator.end()


def kinds_of(folder) -> list[str]:
    return [event["kind"] for event in jsonlog.read(store(folder), "events.jsonl")]


def test_events_that_cannot_be_written_cost_no_worker(tmp_path, full):
    coordinator, fill = full
    coordinator.expect(dict.fromkeys("abc", "n"), True)
    workers = Workers(coordinator)
    workers.come(*"abc")
    for name in "abc":
        workers.receive(name, "join")
    fill(True)
    for step in range(3):
        workers.clients["a"].send(WorkerEvent("save", {"step": step}, 1.0))
    workers.clients["a"].send(StepDone(0, 9, 99, {}))
    until = time.monotonic() + 60
    while coordinator.snapshot().progress.get("step") != 9 and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(workers.ended[name].is_set() for name in "abc")
    fill(False)
    coordinator.end()
    assert kinds_of(tmp_path) == ["driver_start", "save", "save", "save"]


def test_frozen_workers_are_found_after_events_could_not_be_written(tmp_path, full):
    coordinator, fill = full
    coordinator.expect(dict.fromkeys("ab", "n"), True)
    workers = Workers(coordinator)
    workers.come(*"ab")
    for name in "ab":
        workers.receive(name, "join")
    fill(True)
    coordinator.expect({"c": "n"})
    workers.come("c")
    workers.receive("a", "stop")  # a request to preempt, which records an event too
    fill(False)
    workers.frozen.add("b")
    assert workers.ended["b"].wait(60)
    coordinator.end()
    assert "resize_asked" in kinds_of(tmp_path)


def test_each_failure_is_recorded_and_charged_once(tmp_path, quiet):
    coordinator = coordinator_of(tmp_path)
    coordinator.start("127.0.0.1")
    assert coordinator.failed("lost", [0], True) == "kept"
    assert coordinator.failed("said again", [], True) == "kept"
    assert coordinator.failed("ours", [0], False) == "none"
    coordinator.end()
    events = jsonlog.read(store(tmp_path), "events.jsonl")
    assert [event["detail"]["error"] for event in events if event["kind"] == "failure"] == ["lost"]


def test_a_state_that_is_told_while_a_generation_begins_does_not_undo_it(tmp_path, quiet, monkeypatch):
    """With the number of the generation before it, the driver was told of no step of the new one."""
    coordinator = coordinator_of(tmp_path)
    within, began = Event(), Event()

    def late(snapshot, **changes):
        if changes == {"state": "waiting for nodes"}:
            within.set()
            began.wait(0.3)  # the snapshot has been read: with a lock, no generation begins until it is written
        return replace(snapshot, **changes)

    monkeypatch.setattr("tidewheel.elastic.run_record.replace", late)
    telling = threading.Thread(target=coordinator.say, args=("waiting for nodes",))
    telling.start()
    within.wait()
    coordinator._dispatcher.form(Generation(7, ("a", "b"), 0.0))
    began.set()
    telling.join()
    coordinator._record.step(StepDone(7, 3, 10, {}))
    assert (coordinator.snapshot().generation, coordinator.snapshot().progress["step"]) == (7, 3)
    coordinator.end()


def test_names_differ_by_run():
    assert actor_name("/a/runs/x") == actor_name("/a/runs/x") != actor_name("/a/runs/y")
