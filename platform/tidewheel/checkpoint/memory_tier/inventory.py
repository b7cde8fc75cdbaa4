"""What the agents of a run hold, and which steps of it are complete. This module does not import torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from tidewheel.checkpoint.memory_tier.protocol import Address, connect

ORIGINS = ("own", "copy", "disk")
"""Origins of copies, the one that is read first before the others."""
ASK_SECONDS = 2.0
"""An agent that does not answer within this time is taken for dead: a dead process refuses at once, a frozen one would
make everyone wait."""


@dataclass(frozen=True)
class Copy:
    """One rank's part at one agent."""

    agent: Address
    part: int
    """Its number at that agent."""
    origin: str
    """"own" for a worker of that node; "copy" for a replica from another node; "disk" for a file of its local disk."""
    path: str
    """The slot's file on that node."""
    step: int
    generation: int
    rank: int
    world_size: int
    bytes: int
    """The byte at which the content ends in the slot."""
    shard: int = -1
    num_shards: int = 0
    """See `slots.Content`."""


@dataclass(frozen=True)
class Inventory:
    """What the agents that answered hold."""

    copies: tuple[Copy, ...]
    alive: tuple[Address, ...]
    """The agents that answered."""
    workers: int
    """Workers connected to them."""
    generation: int
    """The newest generation that has contacted any of them; -1: none."""
    run_token: str = field(repr=False)
    damaged: tuple[str, ...] = ()
    """What is wrong with files on local disks."""


@dataclass(frozen=True)
class Recoverable:
    """A complete step: every rank's part is in memory somewhere, or that of a rank with a copy of it."""

    step: int
    generation: int
    world_size: int
    copies: tuple[tuple[Copy, ...], ...]
    """By rank, that of the worker's own node first, and those on disks last; none of a rank whose part is lost."""
    run_token: str = field(repr=False)

    @property
    def tier(self) -> Literal["memory", "disk"]:
        """Where it is; "disk" if any part is on a local disk alone."""
        in_memory = all(any(copy.origin != "disk" for copy in copies) for copies in self.copies if copies)
        return "memory" if in_memory else "disk"

    @property
    def lost(self) -> list[int]:
        """Ranks whose parts are lost, of which other ranks have copies."""
        return [rank for rank, copies in enumerate(self.copies) if not copies]


def inventory(agents: Iterable[Address], run_token: str, *, generation: int | None = None,
              seconds: float = ASK_SECONDS) -> Inventory:
    """Ask all agents at once what they hold; skip those that do not answer.

    Args:
        agents: addresses; duplicates are allowed.
        run_token: the run's secret.
        generation: number of the asking generation; the agents then refuse earlier epochs. None: for readers.
        seconds: time limit of an answer.
    """
    asked = sorted(set(agents))
    question = {"op": "inventory", **({} if generation is None else {"generation": generation})}
    with ThreadPoolExecutor(max(1, min(64, len(asked)))) as pool:
        answers = list(pool.map(lambda agent: ask(agent, run_token, question, seconds=seconds), asked))
    alive = {agent: answer for agent, answer in zip(asked, answers) if answer is not None}
    copies = tuple(Copy(agent=agent, **part) for agent, answer in alive.items() for part in answer["parts"])
    return Inventory(copies, tuple(alive), sum(answer["workers"] for answer in alive.values()),
                     max((answer["generation"] for answer in alive.values()), default=-1), run_token,
                     tuple(line for answer in alive.values() for line in answer.get("damaged", ())))


def ask(agent: Address, token: str, message: dict[str, Any], *, seconds: float = ASK_SECONDS) -> dict[str, Any] | None:
    """Return an agent's answer to one message; None when it is dead, frozen or refuses.

    Args:
        agent: the agent's address.
        token: the run's secret.
        message: the request.
        seconds: time limit of the answer.
    """
    try:
        connection = connect(agent, token, seconds=seconds, idle_seconds=seconds)
        try:
            return connection.ask(message)
        finally:
            connection.close()
    except OSError:
        return None


def candidates(holdings: Inventory) -> list[Recoverable]:
    """Return all complete steps, the newest first.

    A step is complete when each rank's part is there. Replicas hold the same parts, so one of each different part is
    enough if rank 0's is among them, which has the lines of the run's logs. A later generation comes before an earlier
    one, whatever their steps: it is what the run did last.
    """
    by_step: dict[tuple[int, int], dict[int, list[Copy]]] = defaultdict(lambda: defaultdict(list))
    for copy in holdings.copies:
        by_step[copy.generation, copy.step][copy.rank].append(copy)
    complete = []
    for (generation, step), by_rank in sorted(by_step.items(), reverse=True):
        world_size = next(copy.world_size for copies in by_rank.values() for copy in copies)
        if set(by_rank) == set(range(world_size)) or _covers(by_rank):
            copies = tuple(tuple(sorted(by_rank.get(rank, ()), key=lambda copy: ORIGINS.index(copy.origin)))
                           for rank in range(world_size))
            complete.append(Recoverable(step, generation, world_size, copies, holdings.run_token))
    return complete


def newest_complete(holdings: Inventory) -> Recoverable | None:
    """Return the newest step of which every rank's part is there, or None."""
    return next((step for step in candidates(holdings) if not step.lost), None)


def _covers(by_rank: Mapping[int, Sequence[Copy]]) -> bool:
    """Return whether each different part is there, and rank 0's: only that has the lines of the run's logs."""
    copies = [copy for copies in by_rank.values() for copy in copies]
    num_shards = copies[0].num_shards
    return 0 in by_rank and num_shards > 0 and {copy.shard for copy in copies} == set(range(num_shards))
