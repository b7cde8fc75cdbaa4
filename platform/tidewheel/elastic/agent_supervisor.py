"""Keeps a memory agent on every node that has workers. A thread of its own does so: no decision waits for an agent."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.elastic.agents import Agents
from tidewheel.elastic.messages import MemoryPlacement

ANSWER_SECONDS = 5.0
"""Time for agents to start and answer."""
RETRY_SECONDS = 2.0
END_SECONDS = 10.0


class AgentSupervisor:
    """Starts agents where they are missing. All methods return at once, except `end`, and any thread may call them.

    Args:
        agents: starts and finds agents; only the supervisor's thread uses it.
    """

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._requested: set[str] = set()
        self._addresses: dict[str, Address] = {}
        self._gone: set[str] = set()
        self._domains: dict[str, str] = {}
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)
        self._thread.start()

    def want(self, nodes: Iterable[str]) -> None:
        """Request an agent on each of these nodes: they have workers, or will have."""
        with self._lock:
            self._requested |= set(nodes)
        self._changed.set()

    def located(self, domains: Mapping[str, str]) -> None:
        """Note the failure domain of each node whose labels name one."""
        self._domains = {**self._domains, **domains}

    def lost(self, node: str, *, for_good: bool) -> None:
        """Note that the agent of a node is gone or does not answer.

        Args:
            node: id of the node.
            for_good: the node is gone too.
        """
        with self._lock:
            self._addresses.pop(node, None)
            self._gone.add(node)
            if for_good:
                self._requested.discard(node)
        self._changed.set()

    def has(self, node: str) -> bool:
        """Return whether the agent of this node is known."""
        return node in self._addresses

    def placement(self, nodes: Sequence[str]) -> MemoryPlacement | None:
        """Return the agents for a generation whose ranks are on `nodes`; None if one of the nodes has no agent."""
        addresses = dict(self._addresses)
        domains = self._domains
        if not all(node in addresses for node in nodes):
            return None
        members: dict[str, list[Address]] = {}
        for node, address in addresses.items():
            if node in domains:
                members.setdefault(domains[node], []).append(address)
        return MemoryPlacement(
            agents=tuple(addresses[node] for node in nodes),
            others=tuple(address for node, address in addresses.items() if node not in nodes),
            domains={domain: tuple(agents) for domain, agents in members.items()},
            token=self._agents.token)

    def end(self, *, over: bool) -> None:
        """Stop supervising.

        Args:
            over: the run is over: end the agents and delete their snapshots. Otherwise the agents upload the newest
                complete step, unless storage has it, and end by themselves; a driver that resumes the run before that
                finds them.
        """
        self._ended = True
        self._changed.set()
        self._thread.join(timeout=END_SECONDS)
        if self._thread.is_alive():
            return  # it waits for a node that does not answer; the agents notice by themselves
        if over:
            self._agents.stop()
        else:
            self._agents.abandon()

    def _run(self) -> None:
        while not self._ended:
            self._changed.wait(RETRY_SECONDS)
            self._changed.clear()
            with self._lock:
                lost_nodes = self._gone
                self._gone = set()
                missing = self._requested - self._addresses.keys()
            for node in lost_nodes:
                self._agents.lost(node)
            if missing and not self._ended:
                self._start(missing)

    def _start(self, missing: set[str]) -> None:
        began = time.monotonic()
        started = self._agents.on(missing, ANSWER_SECONDS)
        with self._lock:
            self._addresses |= {node: address for node, address in started.items() if node not in self._gone}
        if len(started) < len(missing) and time.monotonic() - began < RETRY_SECONDS:
            time.sleep(RETRY_SECONDS)  # some agents cannot start now
