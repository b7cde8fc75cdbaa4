"""Nodes that failed again and again are left out, across runs, unless the run needs them; what does not count."""

from __future__ import annotations

import time
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.elastic.world import LIMITS, READMIT, World
from tidewheel import jsonlog, storage
from tidewheel.cluster import node_history
from tidewheel.cluster.node_history import NodeFailure, NodeHistory, by_host
from tidewheel.elastic.blame import Blame
from tidewheel.elastic.client import Client
from tidewheel.elastic.coordinator import Coordinator
from tidewheel.elastic.layout import largest_fit
from tidewheel.elastic.membership import Membership
from tidewheel.elastic.messages import ExitReason, Hello, Join, Probe, Probed
from tidewheel.elastic.node_health import NodeHealth
from tidewheel.elastic.nodes import Node
from tidewheel.elastic.policy import FailureBudget, Resizer
from tidewheel.ownership import acquire
from tidewheel.train.elastic_config import ElasticConfig
from tidewheel.train.node_checks_config import NodeChecksConfig

HOUR = 3600.0


class Nodes(World):
    """A world whose membership knows the health of nodes; its wall clock is its monotonic clock."""

    def __init__(self, sizes: tuple[int, ...], past: Any = (), history: NodeHistory | None = None,
                 **settings: Any) -> None:
        super().__init__(sizes)
        self.healthy = True
        self.health = NodeHealth(NodeChecksConfig(**settings), self, past, history=history, clock=lambda: self.now)
        resizer = Resizer(sizes, join_wait_seconds=1, interval_seconds=2, answer_seconds=30)
        self.membership = Membership(sizes, resizer, FailureBudget(), self, limits=LIMITS, blame=Blame(READMIT),
                                     health=self.health)

    def lose_and_replace(self, name: str, **options: Any) -> str:
        """Lose a member; another process starts on its node. Return its name."""
        node = self.membership.workers[name].node
        self.run(self.membership.furthest_step + 1)
        self.lose(name)
        self.leave(*[member for member in self.members if member in self.membership.workers])
        self.come(name + "'", node=node, **options)
        return name + "'"


    def settle(self) -> None:
        """Let the run grow by the workers that stand by, if it wants to."""
        self.run(self.membership.furthest_step + 1)
        self.wait(100, *self.membership.workers)  # growth must pay for itself
        if self.take_receivers("stop"):
            self.leave(*self.members, reason=ExitReason.PREEMPTED)


def failures(*times: float, host: str = "node of b", run: str = "r") -> list[NodeFailure]:
    return [NodeFailure(at, host, run, "its process has ended") for at in times]


def nodes_of(world: World) -> set[str]:
    return {world.membership.workers[name].node for name in world.members}


@pytest.fixture
def many() -> Nodes:
    """Return a world of twelve nodes with a worker each."""
    world = Nodes(tuple(range(1, 13)))
    world.start(*"abcdefghijkl")
    return world


def test_a_node_that_failed_twice_is_left_out_and_used_again_when_its_time_is_over(many: Nodes):
    again = many.lose_and_replace("b")
    many.settle()
    assert "node of b" in nodes_of(many)
    many.lose_and_replace(again)
    many.settle()
    assert "node of b" not in nodes_of(many)
    assert len(many.members) == 11
    [out] = many.details("node_excluded")
    assert (out["host"], out["failures"], out["runs"]) == ("node of b", 2, 1)
    many.now += HOUR
    for worker in many.membership.workers.values():
        worker.beat = many.now
    many.settle()
    assert "node of b" in nodes_of(many)
    assert [detail["reason"] for detail in many.details("node_used_again")] == ["its time is over"]


def test_the_history_is_shared_by_runs(tmp_path: Path):
    folder = storage.store(tmp_path)
    first = NodeHistory(folder, "runs/one")
    for number in (1, 2):
        first.append("node of b", f"error {number}", 90.0)
    first.close()
    past = node_history.read(folder, since=50.0)
    assert [(failure.host, failure.run, failure.text) for failure in past] == [
        ("node of b", "runs/one", "error 1"), ("node of b", "runs/one", "error 2")]
    world = Nodes((1, 2), past)
    world.start("a", "b", "c")  # three nodes for two ranks
    assert nodes_of(world) == {"node of a", "node of c"}
    assert node_history.read(folder, since=91.0) == []


def test_damaged_lines_of_the_history_are_passed_over(tmp_path: Path):
    NodeHistory(storage.store(tmp_path), "r").append("h", "x", 1.0)
    with (tmp_path / node_history.LOG).open("a") as log:
        log.write('{"time": "now"}\n[1]\n{"time": 2, "host": "h", "run": "r", "te')
    assert len(node_history.read(storage.store(tmp_path), 0.0)) == 1


def test_a_node_is_better_than_none_and_than_half_as_many_workers():
    world = Nodes((1, 2), failures(90, 95))
    world.start("a", "b")
    assert nodes_of(world) == {"node of a", "node of b"}
    assert not world.details("node_excluded")


def test_a_node_that_was_left_out_is_used_when_too_few_others_remain(many: Nodes):
    again = many.lose_and_replace("b")
    many.settle()
    twice = many.lose_and_replace(again)
    many.settle()
    assert "node of b" not in nodes_of(many)
    many.lose("c")
    many.leave(*[member for member in many.members if member != "c"])
    assert len(many.members) == 11
    assert twice in many.members
    assert [detail["reason"] for detail in many.details("node_used_again")] == ["too few workers without it"]


def test_drains_spot_nodes_and_planned_stops_do_not_count(many: Nodes):
    for _ in range(3):
        many.membership.drain({"node of b"})
        many.run(many.membership.furthest_step + 1)
        [name] = [name for name in many.members if many.membership.workers[name].node == "node of b"]
        many.lose(name)
        many.leave(*[member for member in many.members if member in many.membership.workers])
        many.membership.drain(set())
        many.come(name + "'", node="node of b")
        many.settle()
    assert "node of b" in nodes_of(many)
    assert not many.details("node_excluded")


def test_the_loss_of_a_spot_node_does_not_count():
    world = Nodes(tuple(range(1, 13)))
    world.membership.expect(list("abcdefghijkl"), world.now, anew=True)
    world.come(*"acdefghijkl")
    world.come("b", spot=True)
    name = "b"
    for _ in range(3):
        name = world.lose_and_replace(name, spot=True)
        world.settle()
    assert not world.details("node_excluded")


def test_the_loss_of_many_nodes_at_once_is_no_nodes_fault(many: Nodes):
    for _ in range(2):
        many.run(many.membership.furthest_step + 1)
        gone = many.members[:4]
        many.lose(*gone)
        many.leave(*[member for member in many.members if member in many.membership.workers])
        for name in gone:
            many.come(name + "'", node=f"node of {name[0]}")
    assert not many.details("node_excluded")


def test_an_error_of_one_worker_counts_and_errors_of_several_nodes_do_not(many: Nodes):
    many.run(1)
    many.fail("b")
    many.run(2)
    many.leave("c", "d", text="RuntimeError: same", kind="RuntimeError")
    many.leave(*[member for member in many.members if member not in "cd"])
    assert [failure.host for failure in many.health._failures] == ["node of b"]


def test_an_old_failure_is_forgotten(many: Nodes):
    again = many.lose_and_replace("b")
    many.now += 25 * HOUR
    for name in many.membership.workers:
        many.membership.beat(name, many.number, 1, many.now)
    many.lose_and_replace(again)
    assert not many.details("node_excluded")


def test_workers_are_not_started_on_nodes_that_are_left_out():
    health = NodeHealth(NodeChecksConfig(), World(), failures(90, 95, host="10.0.0.2"), clock=lambda: 100.0,
                        hosts={"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3"})
    assert health.avoid({"n1": 1, "n2": 1, "n3": 1}, (1, 2)) == {"n2"}
    assert health.avoid({"n1": 1, "n2": 1}, (1, 2)) == set()
    assert health.avoid({"n2": 1}, (1,)) == set()


@pytest.mark.parametrize("at", [2, 4, 8])
def test_the_time_doubles_with_the_failures(at: int):
    record = by_host(failures(*range(at)), 0.0)["node of b"]
    assert record.excluded_until(2, 100.0) == at - 1 + 100.0 * at / 2
    assert record.excluded_until(at + 1, 100.0) < 0
    assert record.excluded_until(0, 100.0) < 0


@given(counts=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 8), min_size=1),
       bad=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 5)), share=st.floats(0, 0.9),
       sizes=st.sets(st.integers(1, 40), min_size=1))
def test_the_run_stays_nearly_as_large(counts: dict[str, int], bad: dict[str, int], share: float, sizes: set[int]):
    past = [failure for host, number in bad.items() for failure in failures(*range(number), host=host)]
    health = NodeHealth(NodeChecksConfig(give_up_share=share), World(), past, clock=lambda: 100.0)
    out = health.avoid(counts, sorted(sizes))
    assert all(bad.get(host, 0) >= 2 for host in out)
    full = largest_fit(sorted(sizes), sum(counts.values()))
    left = largest_fit(sorted(sizes), sum(count for host, count in counts.items() if host not in out))
    assert not out or left >= max(1, (1 - share) * full)
    for host in {host for host in counts if bad.get(host, 0) >= 2} - out:  # no further one could be left out
        rest = sum(count for other, count in counts.items() if other not in out | {host})
        assert largest_fit(sorted(sizes), rest) < max(1, (1 - share) * full)


# -- the test at the start ------------------------------------------------------------------------
def test_a_node_that_fails_its_test_at_the_start_is_left_out_and_named():
    world = Nodes((1, 2))
    world.membership.expect(["a", "b", "c"], world.now, anew=True)
    world.membership.hello("b", "node of b", world.now, problem="ProbeError: 3 entries of a product are wrong on cpu")
    world.come("a", "c")
    assert nodes_of(world) == {"node of a", "node of c"}
    assert world.fenced == ["b"]
    [out] = world.details("worker_left_out")
    assert (out["node"], out["level"]) == ("node of b", "node")
    assert "its test at the start failed: ProbeError" in out["reason"]
    assert world.membership.nodes_out(world.now + 1) == {"node of b"}
    assert not world.take_receivers("raise")


def test_of_a_node_with_several_gpus_only_the_bad_one_is_left_out():
    world = Nodes((1, 2))
    world.membership.expect(["a0", "a1"], world.now, anew=True)
    world.membership.hello("a0", "a", world.now, device="0", problem="ProbeError: 4 uncorrected memory errors")
    world.come("a1", node="a", device="1")
    assert world.members == ("a1",)
    assert not world.membership.nodes_out(world.now + 1)


def test_a_run_whose_nodes_all_fail_their_test_ends_with_the_reason():
    world = Nodes((1, 2))
    for attempt in range(4):
        names = [f"{letter}{attempt}" for letter in "ab"]
        world.membership.expect(names, world.now, anew=True)
        for name in names:
            world.membership.hello(name, f"node of {name[0]}", world.now, problem="OSError: no space left")
    raised = [message.text for _, message in world.sent if message.type == "raise"]
    assert any("no space left" in text for text in raised)


def test_a_worker_whose_clock_seems_wrong_must_pass_a_probe_first():
    world = Nodes((1, 2))
    world.healthy = False
    world.membership.expect(["a", "b"], world.now, anew=True)
    world.membership.hello("b", "node of b", world.now, ask=True)
    world.come("a")
    world.membership.tick(world.now)
    assert world.take_receivers("probe") == ["b"]
    assert world.members == ("a",)
    world.membership.probed("b", "its clock is 90 s ahead of the driver's", world.now)
    assert world.fenced == ["b"]


@pytest.mark.parametrize(("off", "admitted"), [(-200.0, False), (200.0, False), (0.0, True)])
def test_a_clock_is_measured_by_a_probe_before_a_node_is_left_out(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: float, admitted: bool):
    """The first message may have waited long, so that its clock says little."""
    monkeypatch.setattr(Coordinator, "_watch", lambda self: None)
    folder = tmp_path / "run"
    coordinator = Coordinator(str(folder), epoch=acquire(storage.store(folder)).epoch)
    coordinator.start("127.0.0.1")
    endpoint = coordinator.endpoint()
    coordinator.expect({"a": "n"}, True)
    received: SimpleQueue[Any] = SimpleQueue()
    ended = Event()
    client = Client(endpoint.address, Hello("a", "n", endpoint.token, clock=time.time() - 300), received.put,
                    lambda *_: ended.set())
    assert received.get(timeout=60) == Probe()
    client.send(Probed("", time.time() + off))
    if admitted:
        assert isinstance(received.get(timeout=60), Join)
    else:
        assert ended.wait(60)
    client.close()
    coordinator.end()
    [event] = [event for event in jsonlog.read(storage.store(folder), "events.jsonl") if "worker" in event["kind"]]
    assert event["kind"] == ("worker_readmitted" if admitted else "worker_left_out")
    if not admitted:
        assert f"200 s {'ahead of' if off > 0 else 'behind'} the driver's" in event["detail"]["reason"]


def test_the_coordinator_knows_hosts_and_where_to_start_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    history = NodeHistory(storage.store(tmp_path), "runs/earlier")
    for _ in range(2):
        history.append("10.0.0.2", "no sign of life for 3 s", time.time())
        history.append("10.0.0.2", "no sign of life for 4 s", time.time())
    history.close()
    alive = [Node(f"n{number}", f"10.0.0.{number}", 1, {"CPU": 1.0}) for number in (1, 2, 3)]
    monkeypatch.setattr("tidewheel.elastic.nodes.alive", lambda selector: alive)
    folder = tmp_path / "run"
    coordinator = Coordinator(str(folder), ElasticConfig(max_workers=2), (1, 2),
                              epoch=acquire(storage.store(folder)).epoch, node_history=str(tmp_path))
    coordinator.start("127.0.0.1")
    coordinator.endpoint()
    until = time.monotonic() + 60
    while coordinator.avoided() != {"n2"}:
        assert time.monotonic() < until
        time.sleep(0.01)
    coordinator.event("failure", {"generation": 0, "nodes": ["n3", "gone"]})
    coordinator.event("worker_left_out", {"node": "n1", "seconds": 1.0})
    coordinator.end()
    recorded = {event["kind"]: event["detail"] for event in jsonlog.read(storage.store(folder), "events.jsonl")}
    assert recorded["failure"]["hosts"] == ["10.0.0.3", ""]
    assert recorded["worker_left_out"]["hosts"] == ["10.0.0.1"]
