"""Keeps a memory agent on every node that has workers. A thread of its own does so: no decision waits for an agent."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.elastic.agents import Agents
from tidewheel.elastic.connection import Endpoint
from tidewheel.elastic.messages import AgentTable, MemoryPlacement
from tidewheel.elastic.supervision import Record, Supervisor

ANSWER_SECONDS = 5.0
"""Time for agents to start and answer."""
RETRY_SECONDS = 2.0
END_SECONDS = 10.0


class AgentSupervisor:
    """Starts agents where they are missing. All methods return at once, except `end`, and any thread may call them.

    Args:
        agents: starts and finds agents; only the supervisor's thread uses it.
        record: records the event of an error; None: errors are only logged.
    """

    def __init__(self, agents: Agents, record: Record | None = None) -> None:
        self._agents = agents
        self._supervisor = Supervisor(record or (lambda kind, detail: None))
        self._requested: set[str] = set()
        self._addresses: dict[str, Address] = {}
        self._gone: set[str] = set()
        self._endpoint: Endpoint | None = None  # of the coordinator to which relays connect
        self._relays: dict[str, tuple[str, int]] = {}
        self._doubtful_relays: set[str] = set()  # nodes whose relay may have ended
        self._renewed_relays: set[str] = set()  # those of them whose agents are asked for a relay again
        self._table: AgentTable | None = None  # the newest of a placement, and its nodes
        self._nodes: tuple[str, ...] = ()
        self._domains: dict[str, str] = {}
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)
        self._thread.start()

    def want(self, nodes: Iterable[str]) -> None:
        """Request an agent on each of these nodes, which will have workers, and a relay where it may have ended."""
        nodes = set(nodes)
        with self._lock:
            self._requested |= nodes
            doubtful = self._doubtful_relays & nodes
            self._doubtful_relays -= doubtful
            self._renewed_relays |= doubtful
        self._changed.set()

    def relay_to(self, endpoint: Endpoint) -> None:
        """Let every agent relay the messages of its node's workers to this coordinator."""
        self._endpoint = endpoint
        self._changed.set()

    def relay(self, node: str) -> tuple[str, int] | None:
        """Return where the workers of this node connect; None if that is the coordinator itself."""
        return self._relays.get(node)

    def doubt_relay(self, node: str) -> None:
        """Note that a node's relay may have ended. Its agent is asked for one again when `want` names the node."""
        with self._lock:
            self._doubtful_relays.add(node)

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
            self._relays.pop(node, None)
            self._gone.add(node)
            if for_good:
                self._requested.discard(node)
        self._changed.set()

    def agents(self) -> tuple[Mapping[str, Address], str]:
        """Return the addresses of the known agents by node, and the secret by which they know each other."""
        with self._lock:
            return dict(self._addresses), self._agents.token

    def has(self, node: str) -> bool:
        """Return whether the agent of this node is known."""
        return node in self._addresses

    def placement(self, nodes: Sequence[str]) -> MemoryPlacement | None:
        """Return the agents for a generation whose ranks are on `nodes`; None if one of the nodes has no agent."""
        with self._lock:
            addresses = dict(self._addresses)
        if not all(node in addresses for node in nodes):
            return None
        table = self._keep_table(nodes, addresses)
        index = {node: number for number, node in enumerate(self._nodes)}
        gone = tuple(number for node, number in index.items() if node not in addresses)
        return MemoryPlacement(table, _rows([index[node] for node in nodes]), gone)

    def _keep_table(self, nodes: Sequence[str], addresses: Mapping[str, Address]) -> AgentTable:
        """Return the table of agents. A new one is made only for a new agent: many workers have to get it."""
        known = dict(zip(self._nodes, self._table.addresses, strict=True)) if self._table is not None else {}
        table = _table([node for node in self._nodes if node in known], known, self._domains, self._agents.token)
        if table != self._table or any(known.get(node) != address for node, address in addresses.items()):
            self._nodes = tuple(dict.fromkeys((*nodes, *addresses)))  # in rank order, so that few rows hold the ranks
            table = _table(self._nodes, addresses, self._domains, self._agents.token)
        self._table = table
        return table

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
            self._supervisor.call("agents", self._look)  # Ray's control store may be unavailable for a moment

    def _look(self) -> None:
        """Start the agents and relays that are missing now."""
        with self._lock:
            lost_nodes = self._gone
            self._gone = set()
            missing = self._requested - self._addresses.keys()
        for node in lost_nodes:
            self._agents.lost(node)
        if missing and not self._ended:
            self._start(missing)
        if self._endpoint is not None and not self._ended:
            self._relay(self._endpoint)

    def _start(self, missing: set[str]) -> None:
        began = time.monotonic()
        started = self._agents.on(missing, ANSWER_SECONDS)
        with self._lock:
            known = {**self._agents.known(), **started}
            self._addresses |= {node: address for node, address in known.items() if node not in self._gone}
        if len(started) < len(missing) and time.monotonic() - began < RETRY_SECONDS:
            time.sleep(RETRY_SECONDS)  # some agents cannot start now

    def _relay(self, endpoint: Endpoint) -> None:
        """Start a relay on each node that has an agent and no relay, or one that may have ended."""
        with self._lock:
            renewed = set(self._renewed_relays)
            missing = [node for node in self._addresses if node not in self._relays or node in renewed]
        started = self._agents.relays(missing, endpoint, ANSWER_SECONDS) if missing else {}
        with self._lock:
            self._renewed_relays -= renewed
            relays = {node: address for node, address in self._relays.items() if node not in renewed}
            self._relays = {node: address for node, address in {**relays, **started}.items() if node in self._addresses}


def _table(nodes: Sequence[str], addresses: Mapping[str, Address], domains: Mapping[str, str],
           token: str) -> AgentTable:
    members: dict[str, list[int]] = {}
    for number, node in enumerate(nodes):
        if node in domains:
            members.setdefault(domains[node], []).append(number)
    return AgentTable(tuple(addresses[node] for node in nodes),
                      {domain: tuple(agents) for domain, agents in members.items()}, token)


def _rows(agents: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Return the agents of the ranks as the rows of `MemoryPlacement.ranks`."""
    rows: list[tuple[int, int, int]] = []
    for agent, ranks in itertools.groupby(agents):
        count = len(list(ranks))
        if rows and rows[-1][0] + rows[-1][1] == agent and rows[-1][2] == count:
            first, nodes, _ = rows[-1]
            rows[-1] = (first, nodes + 1, count)
        else:
            rows.append((agent, 1, count))
    return tuple(rows)
