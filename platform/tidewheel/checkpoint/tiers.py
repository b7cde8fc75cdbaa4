"""Both tiers as one `train.runtime.Checkpointer`: memory for the newest states, storage for durable checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.memory_tier.client import MemoryTier
from tidewheel.checkpoint.memory_tier.holders import holders_of
from tidewheel.checkpoint.memory_tier.interval import KeepInterval
from tidewheel.checkpoint.memory_tier.inventory import ORIGINS
from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.checkpoint.memory_tier.replicas import replica_candidates
from tidewheel.checkpoint.memory_tier.restore import Recoverable, candidates, describe, inventory, load
from tidewheel.checkpoint.staging import flatten
from tidewheel.checkpoint.suspects import Suspects
from tidewheel.checkpoint.verify import newest_committed
from tidewheel.commit_log import epoch_of
from tidewheel.errors import CheckpointError, StorageError
from tidewheel.train.runtime import Keeps, Loaded, Saves

OnEvent = Callable[[str, dict[str, Any]], None]
LIST_SECONDS = 3.0
"""Time limit for asking storage for its newest checkpoint when memory holds a state."""


@dataclass(frozen=True)
class Placement:
    """The memory agents that a generation uses."""

    agents: tuple[Address, ...]
    """Agent of each rank's node, by rank."""
    others: tuple[Address, ...]
    """Agents of nodes that have no rank now but may hold parts."""
    token: str = field(repr=False)
    """The run's secret."""
    domains: Mapping[Address, str] = field(default_factory=dict)
    """Failure domain by agent, for nodes that have a label for it."""

    @property
    def known(self) -> list[Address]:
        """All agents, sorted."""
        return sorted({*self.agents, *self.others})


class TieredCheckpoints:
    """The checkpoints of a run with a memory tier above them. All ranks call its methods together.

    Args:
        saved: the tier in storage.
        placement: the agents of the memory tier.
        rank: this worker's.
        world_size: number of ranks.
        generation: number of the worker group.
        every_steps: keep the state in memory every this many steps; 0: never; auto: as often as `share` allows, and
            never while an earlier copy is under way.
        share: for auto, the share of the time that copies may take.
        replica: keep a copy on another node.
        disk_steps: write the state to the nodes' local disks every this many steps, whenever it is next kept in memory;
            0: never.
        on_event: called on rank 0 with ("memory_refused", detail) when a state in memory is damaged, with
            ("local_disk_refused", detail) when one on local disks is, and on any rank with the events of `MemoryTier`.
    """

    def __init__(self, saved: CheckpointManager, placement: Placement, *, rank: int, world_size: int, generation: int,
                 every_steps: int | Literal["auto"] = 1, share: float = 0.02, replica: bool = True,
                 disk_steps: int = 0, on_event: OnEvent | None = None) -> None:
        self._saved, self._placement, self._on_event = saved, placement, on_event
        self._rank, self._generation, self._every_steps = rank, generation, every_steps
        self._interval = KeepInterval(every_steps, share)
        self._disk_steps, self._on_disk = disk_steps, 0
        own_agent = placement.agents[rank]
        replicas = replica_candidates(placement.known, own_agent, placement.domains) if replica else ()
        self._tier = MemoryTier(dict(enumerate(placement.agents)), own_agent, replicas, rank, world_size,
                                placement.token, generation=generation, local_disk=bool(disk_steps),
                                checkpoints=saved.store.uri, on_event=on_event)

    # -- memory --------------------------------------------------------------------------------
    def has_memory(self) -> bool:
        """Return whether the settings ask for a memory tier."""
        return self._every_steps != 0

    def keeps(self, step: int) -> bool:
        """Return whether the state of this step is to go to the memory tier; called on rank 0."""
        return self.has_memory() and self._tier.working and self._interval.due(step, self._tier.costs)

    def may_keep(self) -> bool:
        """Return whether this rank can keep a state: the tier works, and an automatic copy would not have to wait."""
        if not self.has_memory():
            return True
        under_way = self._every_steps == "auto" and self._tier.under_way()
        return self._tier.working and not under_way

    def keeping(self) -> Keeps:
        """Return what this rank has kept."""
        return Keeps(self._tier.last.get("step", -1), self._tier.waits)

    def keep(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        """Copy a state to the memory tier.

        Args:
            step: step of the state.
            state: tensors by name.
            extra: JSON values, such as the position.
        """
        self._interval.began()
        # all ranks keep the same steps, so they write the same steps
        disk = self._disk_steps > 0 and step // self._disk_steps > self._on_disk // self._disk_steps
        if disk:
            self._on_disk = step
        self._tier.snapshot(step, state, extra, disk=disk)

    def settle(self) -> None:
        """Wait until the tensors given to `save` and `keep` may change."""
        self._tier.settle()
        self._saved.settle()

    def is_safe(self, step: int) -> bool:
        """Return whether the state of this step survives the loss of this node."""
        return self._tier.flush() and self._tier.last.get("step") == step

    def break_off(self) -> None:
        """End a wait for the memory tier. Safe to call from any thread."""
        self._tier.break_off()

    def close(self) -> None:
        """Unmap shared memory; the agents keep what is in it."""
        self._tier.close()

    # -- storage -------------------------------------------------------------------------------
    def save(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        """Save a checkpoint to storage; see `CheckpointManager.save`.

        Args:
            step: step of the state.
            state: tensors by name.
            extra: JSON values, such as the position.
        """
        self._saved.save(step, state, extra)

    def wait(self) -> None:
        """Wait until all saves are committed or have failed."""
        self._saved.wait()

    def let_go(self) -> None:
        """Abandon the save in progress unless it is about to finish."""
        self._saved.let_go()

    def saves(self) -> Saves:
        """Return the state of saving to storage."""
        return self._saved.saves()

    def distrust(self, after: int, detail: dict[str, Any]) -> None:
        """Mark all states of later steps as suspect, in both tiers; see `CheckpointManager.distrust`.

        Args:
            after: the last step that is known good.
            detail: why, JSON values.
        """
        self._saved.distrust(after, detail)

    def load_from(self, uri: str, state: dict[str, Any], head: str = "") -> Loaded:
        """Fill the tensors of `state` in place from another run's checkpoint; return which one it was.

        Args:
            uri: of the checkpoint, or of its run.
            state: nested dict of tensors.
            head: see `load_uri`.
        """
        return self._saved.load_from(uri, state, head)

    def load_saved(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Forget the states in memory, and fill the tensors of `state` from the newest checkpoint in storage."""
        self._tier.forget()
        return self._saved.load_saved(state)

    # -- both ----------------------------------------------------------------------------------
    def load_branch(self, uri: str, step: int, state: dict[str, Any]) -> dict[str, Any]:
        """Fill the tensors of `state` in place from another run's checkpoint; see `CheckpointManager.load_branch`.

        Args:
            uri: the other run.
            step: of the checkpoint.
            state: tensors by name.
        """
        return self._saved.load_branch(uri, step, state)

    def load_latest(self, state: dict[str, Any],
                    usable: Callable[[Mapping[str, Any]], bool] | None = None) -> dict[str, Any] | None:
        """Fill the tensors of `state` from the newest state in memory or storage; all ranks load the same one.

        Args:
            state: tensors by name.
            usable: see `CheckpointManager.load_latest`.

        Returns:
            its `extra`, with "tier": "memory" or "disk" when it came from there; None when there is nothing to load.

        Raises:
            CheckpointError: there are checkpoints but none is intact, or the state does not fit.
            StorageError: the store does not answer.
        """
        self._saved.wait()
        peers = self._saved.peers
        self._tier.rules = self._saved.rules(state)
        self._tier.holders = holders_of(peers, flatten(state))
        for candidate in peers.from_first(lambda: self._candidates(usable)):
            try:
                extra = load(candidate, state, process_group=peers.group, own_agent=self._placement.agents[self._rank],
                             on_read=partial(self._restored, candidate))
            except CheckpointError as error:
                kind = "memory_refused" if candidate.tier == "memory" else "local_disk_refused"
                self._event(kind, {"step": candidate.step, "reason": error.what})
                continue
            self._on_disk = candidate.step
            return {**extra, "tier": candidate.tier}
        return self._saved.load_latest(state, usable)

    def _candidates(self, usable: Callable[[Mapping[str, Any]], bool] | None) -> Sequence[Recoverable]:
        """Return the usable complete states in memory that are not older than storage's newest, the newest first."""
        holdings = inventory(self._placement.known, self._placement.token, generation=self._generation)
        if holdings.damaged:
            self._event("local_disk_refused", {"reason": "; ".join(holdings.damaged)[:500]})
        in_memory = candidates(holdings)
        try:
            oldest = newest_committed(self._saved.store, seconds=LIST_SECONDS) if in_memory else (0, 0)
            suspects = Suspects.of(self._saved.store) if in_memory else Suspects()
        except StorageError:
            oldest, suspects = (0, 0), Suspects()  # storage does not answer, so memory is all there is
        newer = [state for state in in_memory if (epoch_of(state.generation), state.step) >= oldest
                 and not suspects.cover(state.step, state.generation)]
        if usable is None:
            return newer
        return [state for state in newer if (extra := describe(state)) is None or usable(extra)]

    def _restored(self, candidate: Recoverable, read: Mapping[str, int]) -> None:
        """Report where a state came from: what the workers' own nodes kept, copies of it, or disks."""
        self._event("restored", {"step": candidate.step, "tier": candidate.tier, "generation": candidate.generation,
                                 "bytes": {origin: read[origin] for origin in ORIGINS if read.get(origin)},
                                 "lost_parts": candidate.lost})

    def _event(self, kind: str, detail: dict[str, Any]) -> None:
        if self._rank == 0 and self._on_event is not None:
            self._on_event(kind, detail)
