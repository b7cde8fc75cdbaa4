"""The worker's side of the memory tier: copies the state into shared memory at a step boundary."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tidewheel.checkpoint.agreement import own_box
from tidewheel.checkpoint.memory_tier.protocol import IDLE_SECONDS, Address, Connection, connect
from tidewheel.checkpoint.memory_tier.slots import (
    EXTRA_BYTES,
    HEADER_BYTES,
    MAX_SLOTS,
    SLOTS_PER_WORKER,
    Content,
    Slot,
)
from tidewheel.checkpoint.memory_tier.table import Piece, lay_out
from tidewheel.checkpoint.staging import Snapshot, dtype_name, flatten, local
from tidewheel.checkpoint.tensor_entry import TensorEntry

OnEvent = Callable[[str, dict[str, Any]], None]
BACKGROUND_BYTES = 4 << 20
"""A smaller state is copied at once, because that is faster than waking a thread."""
COSTS = 3
"""Snapshots whose costs are kept."""
ALLOCATE_SECONDS = 600.0
"""Longest time that an agent takes for a slot: it allocates gigabytes, for one worker of its node after the other. An
agent that is frozen is given up after it, and training goes on without the tier."""
PUSH_SECONDS = 60.0
"""The tier is given up when the replica of the previous snapshot takes longer than this."""


class MemoryTier:
    """Snapshots of this rank's part of the state, in the memory of its node and of another node.

    A failure of the tier never fails the training. It is reported through `on_event`, and `snapshot` does nothing from
    then on, until the next generation makes a new tier.

    Args:
        agents: the agent of each rank's node, by rank.
        own_agent: the agent of this node.
        replicas: the agents that may hold replicas, in order of preference (see `replicas.replica_candidates`); empty:
            no replicas, so the loss of the node loses its snapshots.
        rank: this worker's.
        world_size: number of ranks.
        run_token: the run's secret, the same as its agents'.
        generation: this worker's; a later generation has a higher number.
        local_disk: the agent writes some of the snapshots to its disk; see `snapshot`.
        checkpoints: URI of the run's checkpoints, where an agent uploads the newest step when all workers are gone;
            "": none does.
        on_event: called with ("memory_tier_lost", detail) when the agent or shared memory fails, and with
            ("replica_lost", detail) when another agent gets the replicas from now on ("copies_to"), or none (""), and
            ("local_disk_failed", detail) when a snapshot did not get to the local disk.
    """

    def __init__(self, agents: Mapping[int, Address], own_agent: Address, replicas: Sequence[Address], rank: int,
                 world_size: int, run_token: str, *, generation: int = 0, local_disk: bool = False,
                 checkpoints: str = "",
                 on_event: OnEvent | None = None) -> None:
        self.agents, self.mine, self.replicas = dict(agents), own_agent, tuple(replicas)
        self.rank, self.world_size, self.generation = rank, world_size, generation
        self._token, self._checkpoints, self._on_event = run_token, checkpoints, on_event
        self._connection: Connection | None = None
        self._slots: list[Slot] = []
        self._page_locked: list[Slot] = []
        self._table = b""
        self._layout: list[tuple[str, torch.Size, torch.dtype]] = []
        self._targets: list[list[torch.Tensor]] = []
        self._sequence = 0  # snapshots of this generation
        self._num_slots = MAX_SLOTS if local_disk else SLOTS_PER_WORKER
        self._newest = -1  # index of the slot of the newest snapshot
        self._pinned: int | None = None  # index of the slot that is being written to the local disk
        self._disk_late = False
        self._awaiting_answer = self._on_device = False
        self._lost = self._replica_lost = False
        self._copier = ThreadPoolExecutor(1, "memory-tier")
        self._copying: Future[None] | None = None
        self.rules: Mapping[str, TensorEntry] = {}
        """By which all ranks share the tensors, by name (see `Agreement`), once they have agreed. A reader then asks
        only the ranks that have what it needs."""
        self.holders: tuple[int, ...] = ()
        """For each rank, the first that holds the same part of the state, once all ranks have agreed. Then one of them
        suffices for a recovery."""
        self.last: dict[str, Any] = {}
        """Figures of the newest snapshot: "step", "copy_seconds", "wait_seconds" (training waited for the previous
        snapshot's replica), "setup_seconds" (training waited for the slot) and "stall_seconds" (training waited for
        this copy, with the slot); and of the newest that the agent has answered: "bytes", "hash_seconds",
        "push_seconds" and "copied" (a replica exists)."""
        self.waits = 0
        """Snapshots that waited because the previous one was still under way."""
        self.costs: deque[float] = deque(maxlen=COSTS)
        """Cost in seconds of each of the newest snapshots that the agent has answered: the time that training stood
        still for the copy, without the wait for a new slot, and the time that the replica was on the network."""

    @property
    def working(self) -> bool:
        """Whether the tier still keeps snapshots."""
        return not self._lost

    def under_way(self) -> bool:
        """Return whether the newest snapshot is still being copied, hashed or sent. Does not wait."""
        if self._lost or self._connection is None:
            return False
        if self._copying is not None and not self._copying.done():
            return True
        try:
            self._await_copy()  # done: this raises its error, if it has one
            if not self._awaiting_answer:
                return False
            if not self._connection.has_answer():
                return True
            self._await_answer()
        except OSError as error:
            self._lose(error)
        return False

    def prepare(self, state: dict[str, Any]) -> None:
        """Allocate the slots for a state of this shape, so that the first snapshot is as fast as the others.

        Raises:
            CheckpointError: the state holds something other than tensors.
        """
        flat = flatten(state)
        try:
            self._open(flat, EXTRA_BYTES)
        except OSError as error:
            self._lose(error)

    def snapshot(self, step: int, state: dict[str, Any], extra: dict[str, Any], *, disk: bool = False) -> None:
        """Keep the state as it is at this call. All ranks call it at the same step boundaries; it is not a collective.

        The state must not change until `settle` returns. The copies to shared memory and to the other node are made in
        the background; the next snapshot waits for both.

        Args:
            step: number of completed steps.
            state: nested dict of tensors.
            extra: JSON values.
            disk: also write it to the local disk of the node, in the background.

        Raises:
            CheckpointError: the state holds something other than tensors.
        """
        began = time.monotonic()
        self.waits += self.under_way()
        if self._lost:
            return
        flat, text = flatten(state), json.dumps(extra).encode()
        parts = {name: local(tensor) for name, tensor in flat.items()}
        try:
            self._await_answer()
            waited = time.monotonic()
            if self._layout != _layout(parts) or len(text) > self._extra_capacity:
                self._open(flat, max(EXTRA_BYTES, 2 * len(text)))
            index = self._next_slot()
            ready = time.monotonic()
            disk = disk and self._disk_is_free(step)
            self._pinned = index if disk else self._pinned
            self._begin(index, step, [parts[name] for name in self._names], text, disk)
        except OSError as error:
            self._lose(error)
            return
        self.last |= {"step": step, "wait_seconds": waited - began, "setup_seconds": ready - waited,
                      "stall_seconds": time.monotonic() - waited}

    def settle(self) -> None:
        """Return once the state given to `snapshot` may change."""
        if self._copying is None:
            return
        began = time.monotonic()
        try:
            self._await_copy()
        except OSError as error:
            self._lose(error)
        self.last["stall_seconds"] += time.monotonic() - began

    def flush(self) -> bool:
        """Wait until the newest snapshot is hashed and replicated; return whether it is on two nodes."""
        try:
            self._await_answer()
        except OSError as error:
            self._lose(error)
        return not self._lost and bool(self.last.get("copied"))

    def forget(self) -> None:
        """Drop this rank's snapshots and their replicas, because the run goes back to a checkpoint."""
        try:
            self._await_answer()
            for slot in self._slots:
                slot.clear()
            if self._connection is not None:
                self._connection.ask({"op": "forget", "rank": self.rank})
        except OSError as error:
            self._lose(error)

    def break_off(self) -> None:
        """End a `snapshot` that waits for the agent, and give up the tier. Safe to call from any thread."""
        connection = self._connection
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Unmap the slots; the agent keeps serving what is in them."""
        with contextlib.suppress(OSError):  # the agent is already gone
            self._await_copy()
        self._copier.shutdown()
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._release()
        self._lost = True

    # -- slots ---------------------------------------------------------------------------------
    def _open(self, flat: dict[str, torch.Tensor], extra_capacity: int) -> None:
        if self._connection is None:
            self._connection = connect(self.mine, self._token)
        pieces = pieces_of(flat)
        self._table, self._placed, self._extra_start = lay_out(
            list(pieces.values()), self._known(pieces), self.holders if self._num_shards < self.world_size else ())
        self._extra_capacity, self._newest, self._pinned = extra_capacity, -1, None
        everyone = sorted({*self.agents.values(), *self.replicas})
        self._connection.ask({"op": "open", "capacity": self._extra_start + extra_capacity, "replicas": self.replicas,
                              "slots": self._num_slots, "agents": everyone, "checkpoints": self._checkpoints,
                              "generation": self.generation})
        self._release()
        self._on_device = any(tensor.is_cuda for tensor in flat.values())
        self._layout = _layout({name: local(tensor) for name, tensor in flat.items()})
        self._names = [name for name in flat if name in pieces]
        self._take_slot(0)

    @property
    def _num_shards(self) -> int:
        return len(set(self.holders))

    @property
    def _shard(self) -> int:
        return sorted(set(self.holders)).index(self.holders[self.rank]) if self.holders else -1

    def _known(self, pieces: Mapping[str, Piece]) -> Mapping[str, TensorEntry]:
        """Return the rules if they are those of these pieces; nothing otherwise."""
        for piece in pieces.values():
            rule = self.rules.get(piece.name)
            if rule is None or (rule.dtype, rule.shape) != (piece.dtype, piece.shape):
                return {}
        return self.rules

    def _next_slot(self) -> int:
        """Return the index of the slot for the next snapshot: the oldest that is not being written to the disk."""
        index = (self._newest + 1) % self._num_slots
        if index == self._pinned:
            index = (index + 1) % self._num_slots
        while index >= len(self._slots):
            self._take_slot(len(self._slots))
        self._newest = index
        return index

    def _disk_is_free(self, step: int) -> bool:
        """Return whether no earlier snapshot is being written to the local disk; report the first that is late."""
        assert self._connection is not None
        if self._pinned is not None and not self._connection.ask({"op": "disk", "rank": self.rank})["busy"]:
            self._pinned = None
        late = self._pinned is not None
        if late and not self._disk_late:
            self._event("local_disk_failed", reason=f"step {step}: an earlier step is still being written")
        self._disk_late = late
        return not late

    def _take_slot(self, index: int) -> None:
        """Map a slot when it is first used; the agent allocates one after the other."""
        assert self._connection is not None
        self._connection.set_idle_limit(ALLOCATE_SECONDS)
        path = self._connection.ask({"op": "slot", "slot": index})["path"]
        self._connection.set_idle_limit(IDLE_SECONDS)
        slot = Slot(Path(path))
        self._slots.append(slot)
        if self._on_device and _page_lock(slot):
            self._page_locked.append(slot)
        slot.bytes[HEADER_BYTES:HEADER_BYTES + len(self._table)] = self._table
        by_name = {piece.name: piece for piece in self._placed}
        self._targets.append([_view(slot, by_name[name]) for name in self._names])

    def _begin(self, index: int, step: int, sources: list[torch.Tensor], text: bytes, disk: bool) -> None:
        """Copy into a slot, in the background unless the state is small, and notify the agent."""
        self._slots[index].clear()
        self._sequence += 1
        content = Content(step, self._sequence, self.generation, self.rank, self.world_size, len(self._table),
                          self._extra_start, len(text), self._shard, self._num_shards)
        snapshot = Snapshot.of(sources)
        if sum(source.nbytes for source in sources) < BACKGROUND_BYTES:
            self._fill(index, content, snapshot, sources, text, disk)
        else:
            self._copying = self._copier.submit(self._fill, index, content, snapshot, sources, text, disk)

    def _fill(self, index: int, content: Content, snapshot: Snapshot, sources: list[torch.Tensor],
              text: bytes, disk: bool) -> None:
        began = time.monotonic()
        slot = self._slots[index]
        connection = self._connection
        with snapshot.copying():
            torch._foreach_copy_(self._targets[index], sources, non_blocking=self._on_device)
        slot.bytes[self._extra_start:content.end] = text
        slot.commit(content)
        if connection is None:
            raise ConnectionError("the tier was given up")
        connection.send({"op": "put", "slot": index, "disk": disk})
        self._awaiting_answer = True
        self.last["copy_seconds"] = time.monotonic() - began

    def _release(self) -> None:
        for slot in self._page_locked:
            torch.cuda.cudart().cudaHostUnregister(_address(slot))  # type: ignore[attr-defined]
        self._targets, self._slots, self._page_locked = [], [], []

    def _await_copy(self) -> None:
        """Wait for the copy to shared memory."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.result()

    def _await_answer(self) -> None:
        """Wait for the answer to the previous snapshot: a replica lags by one at most, see `slots.SLOTS_PER_WORKER`."""
        self._await_copy()
        if not self._awaiting_answer or self._connection is None:
            return
        self._connection.set_idle_limit(PUSH_SECONDS)
        answer = self._connection.answer()
        self._awaiting_answer = False
        self.last |= {key: answer[key] for key in ("bytes", "hash_seconds", "push_seconds")}
        self.last["copied"] = bool(answer["copied_to"])
        self.costs.append(self.last["stall_seconds"] - self.last["setup_seconds"] + self.last["push_seconds"])
        if not answer["disk_busy"]:
            self._pinned = None
        if answer["disk_problem"]:
            self._event("local_disk_failed", reason=answer["disk_problem"])
        if answer["refused"] and not (self._replica_lost and not answer["copied_to"]):
            self._event("replica_lost", reason=answer["refused"], copies_to=answer["copied_to"])
        self._replica_lost = bool(self.replicas) and not answer["copied_to"]

    def _lose(self, error: OSError) -> None:
        self.close()
        self._event("memory_tier_lost", reason=str(error) or type(error).__name__)

    def _event(self, kind: str, **detail: Any) -> None:
        if self._on_event is not None:
            self._on_event(kind, {"rank": self.rank, "agent": f"{self.mine.host}:{self.mine.port}", **detail})


def pieces_of(flat: dict[str, torch.Tensor]) -> dict[str, Piece]:
    """Return the piece of each tensor that this rank holds, without the empty pieces of tensors with few rows.

    Args:
        flat: tensors by path, see `staging.flatten`.
    """
    pieces = {}
    for name, tensor in flat.items():
        own = own_box(tensor)
        if own.elements or not tensor.numel():
            pieces[name] = Piece(name, dtype_name(tensor), tuple(tensor.shape), own.offsets, own.sizes)
    return pieces


def _layout(parts: dict[str, torch.Tensor]) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, part.shape, part.dtype) for name, part in parts.items()]


def _view(slot: Slot, piece: Piece) -> torch.Tensor:
    data = torch.frombuffer(slot.bytes, dtype=torch.uint8, count=piece.bytes, offset=piece.start) if piece.bytes else (
        torch.empty(0, dtype=torch.uint8))
    return data.view(getattr(torch, piece.dtype)).view(piece.sizes)


def _page_lock(slot: Slot) -> bool:
    """Lock the slot's pages so that copies from the GPU run at full speed; return False if the system refuses."""
    return not int(torch.cuda.cudart().cudaHostRegister(_address(slot), slot.capacity, 0))  # type: ignore[attr-defined]


def _address(slot: Slot) -> int:
    return torch.frombuffer(slot.bytes, dtype=torch.uint8).data_ptr()
