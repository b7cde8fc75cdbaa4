"""Tell the workers of a generation their memory agents: one choice for all ranks, and each table once per worker."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from tidewheel.elastic.messages import AgentTable, MemoryPlacement


class PlacementOrders:
    """Keeps the placement of the present generation, and which workers have its table of agents.

    A table has all nodes of the cluster, and is sent to each worker. So a worker gets it once, until an agent is new.
    """

    def __init__(self) -> None:
        self._placement: MemoryPlacement | None = None
        self._without_table: MemoryPlacement | None = None
        self._table: AgentTable | None = None  # the newest that was sent
        self._have_table: set[str] = set()

    def begin(self, placement: MemoryPlacement | None, workers: Collection[str]) -> None:
        """Set the placement of a new generation.

        Args:
            placement: with its table; None if the generation has no memory tier.
            workers: names of all workers that live.
        """
        self._placement = placement
        if placement is None:
            return
        if placement.agents == self._table:
            self._have_table &= set(workers)
        else:
            self._have_table.clear()
        self._table = placement.agents
        self._without_table = replace(placement, agents=None)

    def of(self, ranks: Mapping[str, int]) -> list[tuple[MemoryPlacement | None, dict[str, int]]]:
        """Return the placement with and without the table, each with those who get it; note that all have the table.

        Args:
            ranks: rank by worker.
        """
        if self._placement is None:
            return [(None, dict(ranks))]
        with_table = {name: rank for name, rank in ranks.items() if name not in self._have_table}
        without = {name: rank for name, rank in ranks.items() if name in self._have_table}
        self._have_table |= ranks.keys()
        return [(placement, part) for placement, part in ((self._placement, with_table), (self._without_table, without))
                if part]

    def forget(self, worker: str) -> None:
        """Note that a process begins under this name: it has no table."""
        self._have_table.discard(worker)
