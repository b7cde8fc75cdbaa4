"""Have the memory agents test the links between nodes before the nodes' workers get a rank."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tidewheel.checkpoint.memory_tier.inventory import ask
from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.elastic.links import Link, Verdict, judge, neighbours
from tidewheel.elastic.supervision import Supervisor

LOOK_SECONDS = 0.1
TESTS_AT_ONCE = 64
LINK_SECONDS = 8.0
"""A test of one link that takes longer has failed."""
TRIES = 3
"""A slow link is measured this many times in all, and the best result counts: a machine may be busy for a moment."""
PAUSE_SECONDS = 0.5


def measure(addresses: Mapping[str, Address], pairs: Iterable[tuple[str, str]], token: str) -> list[Link]:
    """Measure links: the agent of each pair's first node measures the link to the second.

    Args:
        addresses: of the agents, by node.
        pairs: nodes whose links are measured.
        token: the run's secret.
    """
    def of(pair: tuple[str, str]) -> Link:
        source, target = pair
        answer = ask(addresses[source], token, {"op": "measure_link", "address": addresses[target]},
                     seconds=LINK_SECONDS)
        if answer is None:
            return Link(source, target, error="the agent does not answer")
        if "error" in answer:
            return Link(source, target, error=str(answer["error"]))
        return Link(source, target, float(answer["seconds"]), min(float(answer["up"]), float(answer["down"])))

    with ThreadPoolExecutor(TESTS_AT_ONCE) as pool:
        return list(pool.map(of, pairs))


def measured_and_judged(links: list[Link], factor: float, again: Callable[[list[tuple[str, str]]], list[Link]],
                        pause_seconds: float = PAUSE_SECONDS) -> tuple[list[Link], Verdict]:
    """Return the links, with slow ones measured again, and the verdict on them.

    Args:
        links: the first measurements.
        factor: see `links.judge`.
        again: measures links again.
        pause_seconds: pause before that.
    """
    best = {(link.source, link.target): link for link in links}
    verdict = judge(best.values(), factor)
    for _ in range(TRIES - 1):
        if not verdict.slow:
            break
        time.sleep(pause_seconds)
        for link in again([(link.source, link.target) for link in verdict.slow]):
            pair = link.source, link.target
            best[pair] = best[pair].better(link)
        verdict = judge(best.values(), factor)
    return list(best.values()), verdict


def machine_of(host: str) -> str:
    """Return a name for the machine of a host: its address, or one name for all loopback addresses."""
    try:
        return "loopback" if ipaddress.ip_address(host).is_loopback else host
    except ValueError:  # a name
        return host


class LinkChecks:
    """Tests the links of each new node in a thread of its own. Links inside a machine are not tested.

    Args:
        factor: see `links.judge`.
        agents: returns the agents' addresses by node, and the token by which they know each other.
        record: records an event.
        machine: returns the machine of a host.
    """

    def __init__(self, factor: float, agents: Callable[[], tuple[Mapping[str, Address], str]],
                 record: Callable[[str, dict[str, Any]], None], machine: Callable[[str], str] = machine_of) -> None:
        self._factor, self._agents, self._record, self._machine = factor, agents, record, machine
        self._tested: set[str] = set()
        self._links: dict[frozenset[str], Link] = {}
        self._problems: dict[str, str] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._supervisor = Supervisor(record)

    def start(self) -> None:
        """Start to look for new nodes."""
        threading.Thread(target=self._run, name="link tests", daemon=True).start()

    def stop(self) -> None:
        """Look for no further nodes."""
        self._ended.set()

    def tested(self, node: str) -> bool:
        """Return whether the links of a node have been tested."""
        return node in self._tested

    def problem(self, node: str) -> str:
        """Return what is wrong with a node's links; "" if nothing is.

        If something is, they are tested once more for the next worker of that node.
        """
        with self._lock:
            problem = self._problems.pop(node, "")
            if problem:
                self._tested.discard(node)
        return problem

    def look(self) -> None:
        """Test the links of the nodes that are new."""
        addresses, token = self._agents()
        new = addresses.keys() - self._tested
        if not new:
            return
        machines = {node: self._machine(address.host) for node, address in addresses.items()}
        first: dict[str, str] = {}  # one node of each machine
        for node in sorted(machines):
            first.setdefault(machines[node], node)
        pairs = neighbours(sorted(first.values()), {first[machines[node]] for node in new})
        problems = self._test(addresses, pairs, token) if pairs else {}
        with self._lock:
            for node in new:
                problem = problems.get(first[machines[node]], "")
                if problem:
                    self._problems[node] = problem
            self._tested |= new

    def _test(self, addresses: Mapping[str, Address], pairs: list[tuple[str, str]], token: str) -> dict[str, str]:
        """Test some links, record the result, and return the problems by node."""
        began = time.monotonic()
        tested_now = {frozenset(pair) for pair in pairs}
        others = [link for key, link in self._links.items() if key not in tested_now and key <= addresses.keys()]
        links, verdict = measured_and_judged([*others, *measure(addresses, pairs, token)], self._factor,
                                             lambda again: measure(addresses, again, token))
        self._links = {frozenset((link.source, link.target)): link for link in links}
        slow = [link for link in verdict.slow if frozenset((link.source, link.target)) in tested_now]
        self._record("links_tested", {
            "links": len(pairs), "slow": len(slow), "seconds": round(time.monotonic() - began, 3),
            "usual_round_trip_seconds": verdict.seconds, "usual_bytes_per_second": round(verdict.bytes_per_second)})
        for link in slow:
            self._record("slow_link", {
                "nodes": [link.source, link.target], "bytes_per_second": round(link.bytes_per_second),
                "round_trip_seconds": link.seconds, "figures": verdict.describe(link),
                "left_out": [node for node in (link.source, link.target) if node in verdict.out]})
        return {node: verdict.problem(node) for node in verdict.out}

    def _run(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._supervisor.call("link tests", self.look)
