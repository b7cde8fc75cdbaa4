"""Nodes test their links to neighbours: slow ones are named with both ends, a node in common to them is left out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.agent_addresses import AgentAddresses
from tests.unit.elastic.network import network
from tidewheel import jsonlog
from tidewheel.checkpoint.memory_tier import link_probe
from tidewheel.checkpoint.memory_tier.agent import Agent
from tidewheel.checkpoint.memory_tier.protocol import Address, connect
from tidewheel.elastic.agent_supervisor import AgentSupervisor
from tidewheel.elastic.client import Client
from tidewheel.elastic.coordinator import Coordinator
from tidewheel.elastic.link_checks import LinkChecks, measure, measured_and_judged
from tidewheel.elastic.links import Link, judge, neighbours
from tidewheel.elastic.messages import Hello
from tidewheel.ownership import acquire
from tidewheel.storage import store
from tidewheel.train.elastic_config import ElasticConfig

FACTOR = 4.0
SLOW_BYTES_PER_SECOND = 1e6


class RealAgents(AgentAddresses):
    """The agents of nodes, at known addresses."""

    def __init__(self, addresses: dict[str, Address]) -> None:
        self.addresses = addresses

    def on(self, nodes: Any, seconds: float) -> dict[str, Address]:
        return {node: self.addresses[node] for node in nodes}


@contextlib.contextmanager
def agents(folder: Path, *hosts: str) -> Iterator[list[Address]]:
    """Run an agent at each of these addresses of this machine."""
    running = [Agent(host, AgentAddresses.token, "links", root=folder) for host in hosts]
    try:
        yield [agent.address for agent in running]
    finally:
        for agent in running:
            agent.stop()


def link(pair: tuple[str, str], rate: float) -> Link:
    return Link(*pair, 0.001, rate)


@given(st.integers(3, 40), st.data())
def test_a_node_whose_links_are_all_slow_is_left_out_and_a_single_link_is_only_named(count: int, draw: st.DataObject):
    nodes = [f"n{number:02d}" for number in range(count)]
    pairs = neighbours(nodes, nodes)
    rates = {pair: draw.draw(st.floats(1e9, 2e9)) for pair in pairs}
    assert judge([link(pair, rate) for pair, rate in rates.items()], FACTOR).slow == ()
    bad = draw.draw(st.sampled_from(nodes))
    verdict = judge([link(pair, 1e7 if bad in pair else rate) for pair, rate in rates.items()], FACTOR)
    assert verdict.out == (bad,)
    assert {(one.source, one.target) for one in verdict.slow} == {pair for pair in pairs if bad in pair}
    assert all(peer in verdict.problem(bad) for pair in pairs if bad in pair for peer in pair if peer != bad)
    broken = draw.draw(st.sampled_from(pairs))
    verdict = judge([link(pair, 1e7 if pair == broken else rate) for pair, rate in rates.items()], FACTOR)
    assert [(one.source, one.target) for one in verdict.slow] == [broken]
    assert verdict.out == ()
    assert verdict.problem(broken[0]) == ""


@given(st.integers(1, 30), st.data())
def test_each_node_tests_two_neighbours_and_a_new_node_tests_only_its_own(count: int, draw: st.DataObject):
    nodes = [f"n{number:02d}" for number in range(count)]
    pairs = neighbours(nodes, nodes)
    expected = 2 * count if count > 4 else count * (count - 1) // 2
    assert len({frozenset(pair) for pair in pairs}) == len(pairs) == expected
    new = draw.draw(st.sampled_from(nodes))
    assert neighbours(nodes, {new}) == [pair for pair in pairs if new in pair]


def test_the_links_of_a_large_cluster_are_judged_in_time():
    """A bad switch slows hundreds of nodes down. The judge shares its process with the coordinator."""
    nodes = [f"n{number:04}" for number in range(2_000)]
    bad = set(nodes[::10])
    links = [link(pair, 1e6 if bad.intersection(pair) else 1e9) for pair in neighbours(nodes, nodes)]
    began = time.process_time()
    assert set(judge(links, FACTOR).out) == bad
    assert time.process_time() - began < 4


def test_a_broken_link_and_a_long_way_are_slow():
    pairs = neighbours(["a", "b", "c", "d", "e"], "abcde")
    links = [Link(*pair, 0.2 if "b" in pair else 0.001, 1e9) for pair in pairs]
    assert judge(links, FACTOR).out == ("b",)
    links = [Link(*pair, error="no route") if "b" in pair else Link(*pair, 0.001, 1e9) for pair in pairs]
    verdict = judge(links, FACTOR)
    assert verdict.out == ("b",)
    assert "no route" in verdict.problem("b")
    assert judge([], FACTOR).out == ()
    assert judge([Link("a", "b", error="no route")], FACTOR).out == ()  # either may be to blame


def test_a_machine_that_was_busy_for_a_moment_is_not_slow():
    pairs = neighbours(["a", "b", "c"], "abc")
    asked = []

    def again(slow: list[tuple[str, str]]) -> list[Link]:
        asked.append(sorted(slow))
        return [link(pair, 1e9) for pair in slow]

    first = [link(pair, 1e6 if "c" in pair else 1e9) for pair in pairs]
    links, verdict = measured_and_judged(first, FACTOR, again, 0.0)
    assert verdict.slow == ()
    assert asked == [[("a", "c"), ("b", "c")]]
    assert {one.bytes_per_second for one in links} == {1e9}


def test_agents_measure_their_link_and_name_one_that_does_not_work(tmp_path: Path):
    with agents(tmp_path, "127.0.0.2", "127.0.0.3") as [a, b], network(b) as slow:
        slow.up.bytes_per_second = SLOW_BYTES_PER_SECOND
        addresses = {"a": a, "b": b, "slow": Address(*slow.address), "gone": Address("127.0.0.4", 1)}
        pairs = [("a", "b"), ("a", "slow"), ("a", "gone"), ("gone", "a")]
        good, bad, refused, silent = measure(addresses, pairs, AgentAddresses.token)
        assert good.seconds > 0
        assert bad.bytes_per_second < 4 * SLOW_BYTES_PER_SECOND
        assert "refused" in refused.error
        assert silent.error


def test_an_agent_sends_no_more_than_a_test_may_ask_for(tmp_path: Path):
    with agents(tmp_path, "127.0.0.1") as [address]:
        for request in ({"op": "give", "bytes": link_probe.MOST_BYTES * 2}, {"op": "take", "bytes": 3}):
            connection = connect(address, AgentAddresses.token)
            with pytest.raises(OSError, match=r"clos|reset"):
                connection.ask(request)
            connection.close()


def test_nodes_that_share_a_machine_test_no_link(tmp_path: Path):
    events: list[str] = []
    with agents(tmp_path, "127.0.0.1", "127.0.0.2") as [a, b]:
        addresses = {"a": a, "b": b}
        checks = LinkChecks(FACTOR, lambda: (addresses, AgentAddresses.token), lambda kind, _: events.append(kind))
        assert not checks.tested("a")
        checks.look()
        assert checks.tested("a")
        assert checks.tested("b")
    assert events == []


def test_the_worker_of_a_node_with_slow_links_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Coordinator, "_watch", lambda self: None)
    run = store(tmp_path / "run")
    with agents(tmp_path, "127.0.0.2", "127.0.0.3", "127.0.0.4") as [a, b, c], network(c) as slow:
        slow.up.bytes_per_second = SLOW_BYTES_PER_SECOND
        coordinator = Coordinator(run.uri, ElasticConfig(max_workers=3), (1, 2, 3), epoch=acquire(run).epoch)
        coordinator._agents.supervisor = AgentSupervisor(RealAgents({"a": a, "b": b, "c": Address(*slow.address)}))
        coordinator._agents.links = LinkChecks(FACTOR, coordinator._agents.supervisor.agents, coordinator.event,
                                               machine=str)
        coordinator.start("127.0.0.1")
        endpoint = coordinator.endpoint()
        coordinator.expect({"A": "a", "B": "b", "C": "c"}, True)
        received = {name: SimpleQueue[Any]() for name in "ABC"}
        ended: SimpleQueue[str] = SimpleQueue()
        clients = [Client(endpoint.address, Hello(name, name.lower(), endpoint.token), received[name].put,
                          lambda name=name: ended.put(name)) for name in "ABC"]  # type: ignore[misc]
        assert [received[name].get(timeout=60).world_size for name in "AB"] == [2, 2]
        assert ended.get(timeout=60) == "C"
        assert not coordinator._agents.links.tested("c")  # once more for its next worker
        while not coordinator._agents.links.tested("c"):
            time.sleep(0.05)
        for client in clients:
            client.close()
        coordinator.end()
    events = jsonlog.read(run, "events.jsonl")
    slow_links = {tuple(event["detail"]["nodes"]) for event in events if event["kind"] == "slow_link"}
    assert slow_links == {("a", "c"), ("b", "c")}
    [left_out] = [event["detail"] for event in events if event["kind"] == "worker_left_out"]
    assert (left_out["worker"], left_out["node"]) == ("C", "c")
    assert "its links are slow, to" in left_out["reason"]
