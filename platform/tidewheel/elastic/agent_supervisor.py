"""Keeps a memory agent on every node that has workers, on a thread of its own: nothing that decides waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tidewheel.checkpoint.memory.protocol import Address
from tidewheel.elastic.agents import Agents

ANSWER_SECONDS = 5.0
AGAIN_SECONDS = 2.0


class AgentSupervisor:
    """All methods return at once, and any thread may call them.

    Args:
        agents: starts and finds them; used by the keeper's thread only.
    """

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._wanted: set[str] = set()
        self._found: dict[str, Address] = {}
        self._gone: set[str] = set()
        self._domains: dict[str, str] = {}
        self._lock, self._news, self._ended = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)
        self._thread.start()

    def want(self, nodes: Iterable[str]) -> None:
        """These nodes have workers now, or will have."""
        with self._lock:
            self._wanted |= set(nodes)
        self._news.set()

    def located(self, domains: Mapping[str, str]) -> None:
        """The failure domain of each node whose labels name one."""
        self._domains = {**self._domains, **domains}

    def lost(self, node: str, *, for_good: bool) -> None:
        """The agent of a node is gone or does not answer; `for_good`: its node too."""
        with self._lock:
            self._found.pop(node, None)
            self._gone.add(node)
            if for_good:
                self._wanted.discard(node)
        self._news.set()

    def has(self, node: str) -> bool:
        """Whether the agent of this node is known."""
        return node in self._found

    def placement(self, nodes: Sequence[str]) -> dict[str, Any] | None:
        """For the workers of a generation whose ranks are on `nodes`: "agents" by rank, "others", "token", and the
        agents in each of the failure "domains". None when one of these nodes has no agent."""
        found, known = dict(self._found), self._domains
        if not all(node in found for node in nodes):
            return None
        others = [found[node] for node in found if node not in nodes]
        domains: dict[str, list[Address]] = {}
        for node, address in found.items():
            if node in known:
                domains.setdefault(known[node], []).append(address)
        return {"agents": [found[node] for node in nodes], "others": others, "domains": domains,
                "token": self._agents.token}

    def end(self, *, over: bool) -> None:
        """Stop; `over`: the agents end too, with what they hold. Else they upload the newest step that is whole, unless
        storage has it, and end; a driver that takes the run up before finds them."""
        self._ended = True
        self._news.set()
        self._thread.join(timeout=10)
        if self._thread.is_alive():
            return  # it waits for a node that does not answer: they find out by themselves
        if over:
            self._agents.stop()
        else:
            self._agents.abandon()

    def _run(self) -> None:
        while not self._ended:
            self._news.wait(AGAIN_SECONDS)
            self._news.clear()
            with self._lock:
                gone, self._gone = self._gone, set()
                missing = self._wanted - self._found.keys()
            for node in gone:
                self._agents.lost(node)
            if not missing or self._ended:
                continue
            began = time.monotonic()
            found = self._agents.on(missing, ANSWER_SECONDS)
            with self._lock:
                self._found |= {node: address for node, address in found.items() if node not in self._gone}
            if len(found) < len(missing) and time.monotonic() - began < AGAIN_SECONDS:
                time.sleep(AGAIN_SECONDS)  # they cannot be started now
