"""The memory agents of the nodes, for the coordinator: who waits for one, whose links are slow, who gets which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tidewheel.elastic.agent_supervisor import AgentSupervisor
from tidewheel.elastic.connection import Endpoint
from tidewheel.elastic.generation import Generation, Worker
from tidewheel.elastic.link_checks import LinkChecks
from tidewheel.elastic.messages import MemoryPlacement
from tidewheel.elastic.placement_orders import PlacementOrders


class NodeAgents:
    """The agents of a run. Without a memory tier there are none, and nobody waits for one.

    Args:
        supervisor: keeps the agents; None without a memory tier.
        links: has the agents test the links between their nodes; None to test none.
    """

    def __init__(self, supervisor: AgentSupervisor | None, links: LinkChecks | None) -> None:
        self.supervisor = supervisor
        self.links = links
        self._placements = PlacementOrders()
        self._cut_on = set[str]()  # nodes of workers that were cut off since `look_again`

    def start(self) -> None:
        """Start to test links."""
        if self.links is not None:
            self.links.start()

    def stop_tests(self) -> None:
        """Test no more links."""
        if self.links is not None:
            self.links.stop()

    def end(self, *, over: bool) -> None:
        """End the agents, or let them keep the state for the next driver; see `AgentSupervisor.end`."""
        if self.supervisor is not None:
            self.supervisor.end(over=over)

    # -- nodes -------------------------------------------------------------------------------------
    def want(self, nodes: Iterable[str]) -> None:
        """Request an agent on each of these nodes, which will have workers, and a relay where it may have ended."""
        if self.supervisor is not None:
            self.supervisor.want(nodes)

    def is_ready(self, node: str) -> bool:
        """Return whether the agent of a node is known and has tested its links, or none is needed."""
        if self.supervisor is None:
            return True
        return self.supervisor.has(node) and (self.links is None or self.links.tested(node))

    def problem(self, node: str) -> str:
        """Return what is wrong with a node's links; "" if nothing is."""
        return self.links.problem(node) if self.links is not None else ""

    def located(self, domains: Mapping[str, str]) -> None:
        """Note the failure domain of each node whose labels name one."""
        if self.supervisor is not None:
            self.supervisor.located(domains)

    def lost(self, node: str, *, for_good: bool) -> None:
        """Note that the agent of a node is gone or does not answer.

        Args:
            node: id of the node.
            for_good: the node is gone too.
        """
        if self.supervisor is not None:
            self.supervisor.lost(node, for_good=for_good)

    def cut_on(self, node: str) -> None:
        """Note that a worker of a node was cut off."""
        self._cut_on.add(node)

    def look_again(self, workers: Iterable[Worker]) -> None:
        """Look again for the agents of nodes whose workers were all cut off: such a node may be stopped.

        This is done once for all workers of a rack that is lost, and before the next generation is told of agents.

        Args:
            workers: all that are left.
        """
        nodes, self._cut_on = self._cut_on, set()
        if self.supervisor is None or not nodes:
            return
        for node in nodes.difference(worker.node for worker in workers):
            self.supervisor.lost(node, for_good=False)

    # -- what workers are told ---------------------------------------------------------------------
    def relay_to(self, endpoint: Endpoint) -> None:
        """Let every agent relay the messages of its node's workers to this coordinator."""
        if self.supervisor is not None:
            self.supervisor.relay_to(endpoint)

    def relay(self, node: str) -> tuple[str, int] | None:
        """Return where the workers of a node connect to share a connection; None if they connect directly."""
        return self.supervisor.relay(node) if self.supervisor is not None else None

    def doubt_relay(self, node: str) -> None:
        """Note that a node's relay may have ended: workers that start there later need another one."""
        if self.supervisor is not None:
            self.supervisor.doubt_relay(node)

    def placements(self, generation: Generation,
                   workers: Mapping[str, Worker]) -> list[tuple[MemoryPlacement | None, dict[str, int]]]:
        """Return the memory agents of a new generation, each choice with the ranks of the workers that get it.

        Args:
            generation: the generation.
            workers: all workers that live, by name.
        """
        placement = None
        if self.supervisor is not None:
            placement = self.supervisor.placement([generation.nodes[name] for name in generation.members])
        self._placements.begin(placement, workers)
        return self._placements.of(generation.ranks)

    def forget(self, worker: str) -> None:
        """Note that a process begins under this name: it knows no agents yet."""
        self._placements.forget(worker)
