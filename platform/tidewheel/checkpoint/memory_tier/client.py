"""The worker's side of the memory tier: copy the state into shared memory at a step boundary, and go on."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner

from tidewheel.checkpoint.memory_tier.agent import EXTRA_BYTES, SLOTS
from tidewheel.checkpoint.memory_tier.protocol import PATIENCE_SECONDS, Address, Connection, connect
from tidewheel.checkpoint.memory_tier.slots import HEADER_BYTES, Content, Slot
from tidewheel.checkpoint.memory_tier.table import Piece, place
from tidewheel.checkpoint.staging import Snapshot, dtype_name, flatten, local

OnEvent = Callable[[str, dict[str, Any]], None]
BEHIND_BYTES = 4 << 20
"""What is smaller is copied at once: that is quicker than to wake a thread."""
PUSH_SECONDS = 60.0
"""How long a snapshot waits for the one before to reach the buddy, before the tier is given up."""


class MemoryTier:
    """This rank's part of the state in the memory of its node, and of a buddy node, after each `snapshot`.

    A failure of the tier never fails the training: it is told through `on_event`, and from then on `snapshot` does
    nothing until the next generation makes a new tier.

    Args:
        agents: of each rank's node, by rank.
        mine: the agent of this node.
        buddies: the agents that may get the copies, see `buddies.ring`: the first that takes them does; empty: no
            copies, and the node's loss is the loss of what it held.
        rank, world_size, generation: this worker's; a later generation has a higher number.
        run_token: the run's secret, the same as its agents'.
        checkpoints: URI of the run's checkpoints, where agents upload the newest step when all workers are gone; "":
            they do not.
        on_event: called with ("memory_tier_lost", detail) when the agent or shared memory is gone, and with
            ("buddy_lost", detail) when copies go to another agent from now on ("copies_to"), or to none ("").
    """

    def __init__(self, agents: Mapping[int, Address], mine: Address, buddies: Sequence[Address], rank: int,
                 world_size: int, run_token: str, *, generation: int = 0, checkpoints: str = "",
                 on_event: OnEvent | None = None) -> None:
        self.agents, self.mine, self.buddies = dict(agents), mine, tuple(buddies)
        self.rank, self.world_size, self.generation = rank, world_size, generation
        self._token, self._checkpoints, self._on_event = run_token, checkpoints, on_event
        self._connection: Connection | None = None
        self._slots: list[Slot] = []
        self._locked: list[Slot] = []
        self._table = b""
        self._layout: list[tuple[str, torch.Size, torch.dtype]] = []
        self._targets: list[list[torch.Tensor]] = []
        self._sequence = self._turn = 0
        self._awaiting = self._on_device = False
        self._lost = self._buddy_lost = False
        self._copier = ThreadPoolExecutor(1, "memory-tier")
        self._copying: Future[None] | None = None
        self.last: dict[str, Any] = {}
        """Of the newest snapshots: "step", "bytes", "copy_seconds", "wait_seconds" (for the copy of the one before) and
        "stall_seconds" (for its own); of the one before: "hash_seconds", "push_seconds", "copied"."""

    @property
    def working(self) -> bool:
        """Whether snapshots are kept."""
        return not self._lost

    def prepare(self, state: dict[str, Any]) -> None:
        """Allocate the slots for a state of this shape: done beforehand, the first snapshot is as quick as any.

        Raises:
            CheckpointError: the state holds something other than tensors.
        """
        flat = flatten(state)
        try:
            self._open(flat, EXTRA_BYTES)
        except OSError as error:
            self._lose(error)

    def snapshot(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        """Keep `state`, a nested dict of tensors, and `extra`, JSON values, as of this call; no collective.

        All ranks call it at the same step boundaries. The state may change after `settle`. The copies, to shared
        memory and to the buddy, are made behind the training; the next snapshot waits for both.

        Raises:
            CheckpointError: the state holds something other than tensors.
        """
        if self._lost:
            return
        began = time.monotonic()
        flat, text = flatten(state), json.dumps(extra).encode()
        parts = {name: local(tensor) for name, tensor in flat.items()}
        try:
            self._answered()
            waited = time.monotonic()
            if self._layout != _layout(parts) or len(text) > self._room:
                self._open(flat, max(EXTRA_BYTES, 2 * len(text)))
            number = self._turn % SLOTS
            if number == len(self._slots):
                self._take_slot(number)
            self._begin(number, step, [parts[name] for name in self._names], text)
        except OSError as error:
            self._lose(error)
            return
        self.last |= {"step": step, "wait_seconds": waited - began, "stall_seconds": time.monotonic() - waited}

    def settle(self) -> None:
        """Return once what was handed over to `snapshot` may change."""
        if self._copying is None:
            return
        began = time.monotonic()
        try:
            self._copied()
        except OSError as error:
            self._lose(error)
        self.last["stall_seconds"] += time.monotonic() - began

    def flush(self) -> bool:
        """Wait until the newest snapshot is hashed and copied; whether it is on two nodes."""
        try:
            self._answered()
        except OSError as error:
            self._lose(error)
        return not self._lost and bool(self.last.get("copied"))

    def forget(self) -> None:
        """The run goes back to a checkpoint: what was kept since is no longer wanted, here and at the buddy."""
        try:
            self._answered()
            for slot in self._slots:
                slot.clear()
            if self._connection is not None:
                self._connection.ask({"op": "forget", "rank": self.rank})
        except OSError as error:
            self._lose(error)

    def break_off(self) -> None:
        """From any thread: a `snapshot` that waits for the agent waits no longer, and the tier is given up."""
        connection = self._connection
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Let go of the slots; the agent holds what is in them."""
        with contextlib.suppress(OSError):  # the agent is gone already
            self._copied()
        self._copier.shutdown()
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._release()
        self._lost = True

    # -- inside --------------------------------------------------------------------------------
    def _open(self, flat: dict[str, torch.Tensor], room: int) -> None:
        if self._connection is None:
            self._connection = connect(self.mine, self._token)
        pieces = pieces_of(flat)
        self._table, self._placed, end = place(list(pieces.values()))
        self._extra_start, self._room, self._turn = end, room, 0
        everyone = sorted({*self.agents.values(), *self.buddies})
        self._connection.ask({"op": "open", "capacity": end + room, "buddies": self.buddies, "agents": everyone,
                              "checkpoints": self._checkpoints, "generation": self.generation})
        self._release()
        self._on_device = any(tensor.is_cuda for tensor in flat.values())
        self._layout = _layout({name: local(tensor) for name, tensor in flat.items()})
        self._names = [name for name in flat if name in pieces]
        self._take_slot(0)

    def _take_slot(self, number: int) -> None:
        """Map a slot at its first turn; the agent makes one after the other."""
        assert self._connection is not None
        self._connection.patience(None)  # gigabytes may still be being allocated
        path = self._connection.ask({"op": "slot", "slot": number})["path"]
        self._connection.patience(PATIENCE_SECONDS)
        slot = Slot(Path(path))
        self._slots.append(slot)
        if self._on_device and _page_lock(slot):
            self._locked.append(slot)
        slot.bytes[HEADER_BYTES:HEADER_BYTES + len(self._table)] = self._table
        by_name = {piece.name: piece for piece in self._placed}
        self._targets.append([_view(slot, by_name[name]) for name in self._names])

    def _begin(self, number: int, step: int, sources: list[torch.Tensor], text: bytes) -> None:
        """Copy into a slot, here if that is quicker than to have it done, and let the agent know."""
        self._slots[number].clear()
        self._sequence, self._turn = self._sequence + 1, self._turn + 1
        content = Content(step, self._sequence, self.generation, self.rank, self.world_size, len(self._table),
                          self._extra_start, len(text))
        snapshot = Snapshot.of(sources)
        if sum(source.nbytes for source in sources) < BEHIND_BYTES:
            self._fill(number, content, snapshot, sources, text)
        else:
            self._copying = self._copier.submit(self._fill, number, content, snapshot, sources, text)

    def _fill(self, number: int, content: Content, snapshot: Snapshot, sources: list[torch.Tensor],
              text: bytes) -> None:
        began, slot, connection = time.monotonic(), self._slots[number], self._connection
        with snapshot.copying():
            torch._foreach_copy_(self._targets[number], sources, non_blocking=self._on_device)
        slot.bytes[self._extra_start:content.end] = text
        slot.commit(content)
        if connection is None:
            raise ConnectionError("the tier was given up")
        connection.send({"op": "put", "slot": number})
        self._awaiting = True
        self.last["copy_seconds"] = time.monotonic() - began

    def _release(self) -> None:
        for slot in self._locked:
            torch.cuda.cudart().cudaHostUnregister(_address(slot))  # type: ignore[attr-defined]
        self._targets, self._slots, self._locked = [], [], []

    def _copied(self) -> None:
        """Wait for the copy to shared memory."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.result()

    def _answered(self) -> None:
        """Wait for the answer to the last snapshot. No rank may be further ahead of its copies: see `agent.SLOTS`."""
        self._copied()
        if not self._awaiting or self._connection is None:
            return
        self._connection.patience(PUSH_SECONDS)
        answer = self._connection.answer()
        self._awaiting = False
        self.last |= {key: answer[key] for key in ("bytes", "hash_seconds", "push_seconds")}
        self.last["copied"] = bool(answer["copied_to"])
        if answer["refused"] and not (self._buddy_lost and not answer["copied_to"]):
            self._event("buddy_lost", reason=answer["refused"], copies_to=answer["copied_to"])
        self._buddy_lost = bool(self.buddies) and not answer["copied_to"]

    def _lose(self, error: OSError) -> None:
        self.close()
        self._event("memory_tier_lost", reason=str(error) or type(error).__name__)

    def _event(self, kind: str, **detail: Any) -> None:
        if self._on_event is not None:
            self._on_event(kind, {"rank": self.rank, "agent": f"{self.mine.host}:{self.mine.port}", **detail})


def pieces_of(flat: dict[str, torch.Tensor]) -> dict[str, Piece]:
    """What this rank holds of each tensor; without the empty parts that ranks have of tensors with few rows."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(flat), is_coordinator=True)
    found = {}
    for item in planner.create_local_plan().items:
        data = item.tensor_data
        assert data is not None
        if all(data.chunk.sizes) or not all(data.size):
            found[item.index.fqn] = Piece(item.index.fqn, dtype_name(flat[item.index.fqn]), tuple(data.size),
                                          tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return found


def _layout(parts: dict[str, torch.Tensor]) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, part.shape, part.dtype) for name, part in parts.items()]


def _view(slot: Slot, piece: Piece) -> torch.Tensor:
    data = torch.frombuffer(slot.bytes, dtype=torch.uint8, count=piece.bytes, offset=piece.start) if piece.bytes else (
        torch.empty(0, dtype=torch.uint8))
    return data.view(getattr(torch, piece.dtype)).view(piece.sizes)


def _page_lock(slot: Slot) -> bool:
    """So that copies from the GPU run at full speed; False, and they are slower, where the system does not allow it."""
    return not int(torch.cuda.cudart().cudaHostRegister(_address(slot), slot.capacity, 0))  # type: ignore[attr-defined]


def _address(slot: Slot) -> int:
    return torch.frombuffer(slot.bytes, dtype=torch.uint8).data_ptr()
