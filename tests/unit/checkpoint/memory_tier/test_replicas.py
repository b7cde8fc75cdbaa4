"""Placement of replicas."""

from __future__ import annotations

import math
import time
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agent_addresses import AgentAddresses
from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.checkpoint.memory_tier.replicas import replica_candidates
from tidewheel.elastic.agent_supervisor import AgentSupervisor
from tidewheel.elastic.worker import tier_placement
from tidewheel.placement import failure_domain


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Address], dict[Address, str]]:
    """Agents on hosts, several on some, in racks; some hosts have no label."""
    hosts = draw(st.lists(st.sampled_from(["", "a", "b", "c", "d"]), min_size=1, max_size=12))
    nodes, domains = [], {}
    for number, rack in enumerate(hosts):
        for port in range(1, draw(st.integers(1, 2)) + 1):
            nodes.append(Address(f"10.0.0.{number}", port))
            if rack:
                domains[nodes[-1]] = rack
    return draw(st.permutations(nodes)), domains


@given(clusters())
def test_a_replica_is_in_another_failure_domain_whenever_there_is_one(cluster):
    nodes, domains = cluster

    def apart(node: Address, other: Address) -> int:
        """2: in another domain, 1: on another host, 0: on the same."""
        if (domains.get(node) or node.host) != (domains.get(other) or other.host):
            return 2
        return int(node.host != other.host)

    for node in nodes:
        others = replica_candidates(nodes, node, domains)
        assert sorted((*others, node)) == sorted(nodes)
        ranks = [apart(node, other) for other in others]
        assert ranks == sorted(ranks, reverse=True)
    if len(nodes) < 2:
        return
    held = Counter(replica_candidates(nodes, node, domains)[0] for node in nodes)
    largest = max(Counter(domains.get(node) or node.host for node in nodes).values())
    if 2 * largest <= len(nodes):
        assert set(held.values()) == {1}
    elif largest < len(nodes):
        assert max(held.values()) <= math.ceil(largest / (len(nodes) - largest))


def test_without_labels_replicas_are_on_other_hosts_if_there_are_any():
    nodes = [Address(f"10.0.0.{host}", port) for host in (1, 2, 3) for port in (1, 2)]
    for node in nodes:
        others = replica_candidates(nodes, node)
        assert [other.host == node.host for other in others] == [False] * 4 + [True]
    assert {replica_candidates(nodes, node)[0] for node in nodes} == set(nodes)
    assert replica_candidates(nodes[:2], nodes[0]) == (nodes[1],)
    assert replica_candidates(nodes[:1], nodes[0]) == ()


def test_the_next_addresses_are_in_the_same_rack():
    """Eight nodes in two racks: the next address would be lost with its node three times out of four."""
    nodes = [Address(f"10.0.0.{host}", 1) for host in range(8)]
    racks = {node: "left" if number < 4 else "right" for number, node in enumerate(nodes)}
    assert all(racks[replica_candidates(nodes, node, racks)[0]] != racks[node] for node in nodes)


def test_the_label_that_people_set_goes_before_the_zone():
    zone = {"topology.kubernetes.io/zone": "europe-1b", "ray.io/market-type": "spot"}
    assert failure_domain(zone) == "europe-1b"
    assert failure_domain({**zone, "tidewheel.io/failure-domain": "rack-7"}) == "rack-7"
    assert failure_domain({"ray.io/availability-zone": "us-west-2a"}) == "us-west-2a"
    assert failure_domain({}) == ""


def test_workers_hear_the_failure_domain_of_every_agent():
    supervisor = AgentSupervisor(AgentAddresses())
    supervisor.located({"x": "rack-1", "y": "rack-1", "z": "rack-2", "elsewhere": "rack-3"})
    supervisor.want(["w", "x", "y", "z"])
    while not all(supervisor.has(node) for node in "wxyz"):
        time.sleep(0.01)
    order = supervisor.placement(["x", "w"])
    supervisor.end(over=False)
    assert order is not None
    placement = tier_placement(order)
    assert placement.agents == (Address("x", 1), Address("w", 1))
    assert placement.domains == {Address("x", 1): "rack-1", Address("y", 1): "rack-1", Address("z", 1): "rack-2"}
    assert replica_candidates(placement.known, Address("x", 1), placement.domains)[-1] == Address("y", 1)


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(st.sampled_from("uvwxyz"), min_size=1, max_size=12),
                          st.sets(st.sampled_from("uvwxyz"))), min_size=1, max_size=4))
def test_workers_hear_the_agent_of_every_rank_and_of_the_other_nodes(generations):
    supervisor = AgentSupervisor(AgentAddresses())
    supervisor.located({"u": "rack-1", "x": "rack-2"})
    table = None
    for ranks, lost in [(list("uvwxyz"), set()), *generations]:
        supervisor.want("uvwxyz")
        while not all(supervisor.has(node) for node in "uvwxyz"):
            time.sleep(0.001)
        others = set("uvwxyz") - set(ranks)
        for node in others & lost:
            supervisor.lost(node, for_good=True)
        order = supervisor.placement(ranks)
        assert order is not None
        assert table in (None, order.agents)  # no agent is new: workers need no new table
        table = order.agents
        placement = tier_placement(order)
        assert placement.agents == tuple(Address(node, 1) for node in ranks)
        assert set(placement.others) == {Address(node, 1) for node in others - lost}
    supervisor.end(over=False)


def test_a_generation_on_full_nodes_is_placed_by_one_row():
    supervisor = AgentSupervisor(AgentAddresses())
    nodes = [f"n{number}" for number in range(9, -1, -1)]
    supervisor.want(nodes)
    while not all(supervisor.has(node) for node in nodes):
        time.sleep(0.01)
    ranks = [node for node in nodes for _ in range(8)]
    assert supervisor.placement(ranks).ranks == ((0, 10, 8),)
    assert supervisor.placement(ranks[:20] + ranks[21:]).ranks == ((0, 2, 8), (2, 1, 7), (3, 7, 8))
    supervisor.end(over=False)
