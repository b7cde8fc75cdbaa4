"""Read the newest state that is whole somewhere in the agents' memory, into ranks of any layout and number."""

from __future__ import annotations

import json
import mmap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from tidewheel.checkpoint.dcp import load_planner
from tidewheel.checkpoint.memory.protocol import CONNECT_SECONDS, Address, connect
from tidewheel.checkpoint.memory.slots import Slot, block_of, block_range, hash_blocks
from tidewheel.checkpoint.memory.table import Piece, parse
from tidewheel.checkpoint.staging import flatten
from tidewheel.errors import CheckpointError

READERS = 8
READ_SECONDS = 5.0
"""An agent that sends nothing for so long is passed over."""
MEND = "the newest intact checkpoint is used instead"


@dataclass(frozen=True)
class Copy:
    """One rank's part at one agent."""

    agent: Address
    part: int
    """Its number there."""
    origin: str
    """"own": of a worker of that node; "copy": held for its buddy."""
    path: str
    step: int
    generation: int
    rank: int
    world_size: int
    bytes: int


@dataclass(frozen=True)
class Inventory:
    """What the agents that answered hold."""

    copies: tuple[Copy, ...]
    alive: tuple[Address, ...]
    run_token: str = field(repr=False)


@dataclass(frozen=True)
class Recoverable:
    """A step of which every rank's part is in memory somewhere."""

    step: int
    generation: int
    world_size: int
    copies: tuple[tuple[Copy, ...], ...]
    """By rank, the worker's own node first."""
    run_token: str = field(repr=False)


def inventory(agents: Iterable[Address], run_token: str, *, seconds: float = CONNECT_SECONDS) -> Inventory:
    """What is held where. Agents that do not answer within `seconds` are passed over; all are asked at once."""
    asked = sorted(set(agents))
    with ThreadPoolExecutor(max(1, min(64, len(asked)))) as pool:
        answers = list(pool.map(lambda each: _ask(each, run_token, seconds), asked))
    copies = [copy for answer in answers if answer is not None for copy in answer]
    alive = [each for each, answer in zip(asked, answers) if answer is not None]
    return Inventory(tuple(copies), tuple(alive), run_token)


def _ask(agent: Address, token: str, seconds: float) -> list[Copy] | None:
    try:
        connection = connect(agent, token, seconds=seconds, patience=seconds)
        try:
            parts = connection.ask({"op": "inventory"})["parts"]
        finally:
            connection.close()
        return [Copy(agent=agent, **part) for part in parts]
    except (OSError, LookupError, TypeError):
        return None  # dead or frozen: recovery goes on with those that answer


def candidates(found: Inventory) -> list[Recoverable]:
    """All steps that are whole, the newest first.

    A later generation goes before an earlier one whatever their steps: it is what the run has done last.
    """
    held: dict[tuple[int, int], dict[int, list[Copy]]] = defaultdict(lambda: defaultdict(list))
    for copy in found.copies:
        held[copy.generation, copy.step][copy.rank].append(copy)
    whole = []
    for (generation, step), by_rank in sorted(held.items(), reverse=True):
        world_size = next(copy.world_size for copies in by_rank.values() for copy in copies)
        if set(by_rank) == set(range(world_size)):
            copies = tuple(tuple(sorted(by_rank[rank], key=lambda copy: copy.origin != "own"))
                           for rank in range(world_size))
            whole.append(Recoverable(step, generation, world_size, copies, found.run_token))
    return whole


def newest_complete(found: Inventory) -> Recoverable | None:
    """The newest step of which every rank's part exists, its own or its buddy's copy; None: there is none."""
    return next(iter(candidates(found)), None)


def load(recoverable: Recoverable, state: dict[str, Any], *, process_group: Any = None,
         mine: Address | None = None) -> dict[str, Any]:
    """Fill the tensors of `state` in place, whatever the layout of those who kept it; their `extra`.

    Every byte that is used is hashed before; of a damaged or lost part the other copy is taken. A rank reads only what
    it needs, from its own node (agent `mine`) by memory map, from others over TCP. Without `process_group` there is no
    collective and each rank's outcome is its own; with it, all ranks raise when one does.

    Raises:
        CheckpointError: a part is damaged or gone in all its copies, or the state does not fit. The tensors may have
            been changed.
    """
    problem: CheckpointError | None = None
    extra: dict[str, Any] = {}
    try:
        extra = _load(recoverable, state, mine)
    except CheckpointError as error:
        problem = error
    if process_group is not None:
        problems: list[CheckpointError | None] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(problems, problem, group=process_group)
        problem = problem or next((each for each in problems if each is not None), None)
    if problem is not None:
        raise problem
    return extra


def _load(recoverable: Recoverable, state: dict[str, Any], mine: Address | None) -> dict[str, Any]:
    flat = flatten(state)
    where = f"memory tier, step {recoverable.step}"
    with ThreadPoolExecutor(READERS, thread_name_prefix="memory tier") as pool:
        parts = list(pool.map(lambda copies: _Part(_near(copies, mine), recoverable.run_token, mine),
                              recoverable.copies))
        parts[0].describe()
        list(pool.map(_Part.describe, parts))
        plan, planner, places = _plan(flat, parts, where)
        wanted: dict[int, list[tuple[ReadItem, Piece]]] = defaultdict(list)
        for item in plan:
            assert item.storage_index.offset is not None
            rank, piece = places[item.storage_index.fqn, tuple(item.storage_index.offset)]
            wanted[rank].append((item, piece))
        list(pool.map(lambda each: _fill(parts[each[0]], each[1], planner), wanted.items()))
    return parts[0].extra


def _near(copies: Sequence[Copy], mine: Address | None) -> list[Copy]:
    return sorted(copies, key=lambda copy: copy.agent != mine)


def _plan(flat: Mapping[str, torch.Tensor], parts: Sequence[_Part],
          where: str) -> tuple[list[ReadItem], Any, dict[tuple[str, tuple[int, ...]], tuple[int, Piece]]]:
    """What this rank reads; and of each box the rank and place to read it from, the nearest of equals."""
    places: dict[tuple[str, tuple[int, ...]], tuple[int, Piece]] = {}
    boxes: dict[str, list[Piece]] = defaultdict(list)
    for rank in sorted(range(len(parts)), key=lambda rank: not parts[rank].near):
        for piece in parts[rank].pieces:
            if (piece.name, piece.offsets) not in places:
                places[piece.name, piece.offsets] = rank, piece
                boxes[piece.name].append(piece)
    for name, tensor in flat.items():
        if name not in boxes:
            raise CheckpointError(f"{name} is not in it", where=where, mend=MEND)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if boxes[name][0].dtype != dtype or boxes[name][0].shape != tuple(tensor.shape):
            raise CheckpointError(f"{name} is {boxes[name][0].dtype} {list(boxes[name][0].shape)} in it, {dtype} "
                                  f"{list(tensor.shape)} in the run", where=where, mend=MEND)
        if sum(piece.bytes for piece in boxes[name]) != tensor.numel() * tensor.element_size():
            raise CheckpointError(f"the parts of {name} do not add up to it", where=where, mend=MEND)
    metadata = Metadata({name: TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, found[0].dtype)), size=torch.Size(found[0].shape),
        chunks=[ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in found])
        for name, found in boxes.items()})
    planner = load_planner()
    planner.set_up_planner(dict(flat), metadata, is_coordinator=True)
    return list(planner.create_local_plan().items), planner, places


@torch.no_grad()
def _fill(part: _Part, items: Sequence[tuple[ReadItem, Piece]], planner: Any) -> None:
    """Copy what is wanted of one part into place."""
    blocks: set[int] = set()
    for item, piece in items:
        start, end = _rows(item, piece)
        if end > start:
            blocks.update(range(block_of(start), block_of(end - 1) + 1))
    data = part.read(_ranges(blocks))
    for item, piece in items:
        start, end = _rows(item, piece)
        sizes, offsets = list(piece.sizes), list(item.storage_offsets)
        if sizes:
            sizes[0], offsets[0] = item.lengths[0], 0
        box = torch.empty(0, dtype=torch.uint8) if end == start else torch.frombuffer(
            data, dtype=torch.uint8, count=end - start, offset=start)
        tensor = box.view(getattr(torch, piece.dtype)).view(sizes)
        for dimension, (offset, size) in enumerate(zip(offsets, item.lengths)):
            tensor = tensor.narrow(dimension, offset, size)
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor)
        planner.commit_tensor(item, target)


def _rows(item: ReadItem, piece: Piece) -> tuple[int, int]:
    """First byte, and end, of the rows of the piece that an item is in; they lie together."""
    if not piece.sizes:
        return piece.start, piece.start + piece.bytes
    row_bytes = piece.bytes // piece.sizes[0] if piece.sizes[0] else 0
    start = piece.start + item.storage_offsets[0] * row_bytes
    return start, start + item.lengths[0] * row_bytes


def _ranges(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of numbers that follow each other, [first, last]."""
    found: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if found and found[-1][1] == block - 1:
            found[-1] = found[-1][0], block
        else:
            found.append((block, block))
    return found


class _Part:
    """One rank's part, from whichever of its copies is alive and intact."""

    def __init__(self, copies: Sequence[Copy], token: str, mine: Address | None) -> None:
        self._copies, self._token, self._mine = list(copies), token, mine
        self._end = copies[0].bytes
        self.near = copies[0].agent == mine
        self.pieces: list[Piece] = []
        self.extra: dict[str, Any] = {}

    def describe(self) -> None:
        """Learn what is in it; CheckpointError when no copy tells."""
        if not self.pieces:
            self._from_any(self._describe)

    def _describe(self, copy: Copy) -> None:
        connection = connect(copy.agent, self._token, patience=READ_SECONDS)
        try:
            answer = connection.ask({"op": "describe", "part": copy.part})
            table = connection.receive_bytes(answer["table_bytes"])
            extra = connection.receive_bytes(answer["extra_bytes"])
        finally:
            connection.close()
        if (xxhash.xxh3_64_intdigest(table), xxhash.xxh3_64_intdigest(extra)) != (
                answer["table_hash"], answer["extra_hash"]):
            raise ValueError("its table is damaged")
        self.extra, self.pieces = json.loads(extra), parse(table, answer["extra_start"])

    def read(self, ranges: Sequence[tuple[int, int]]) -> memoryview:
        """The bytes of the part, of which those in `ranges` of blocks, first and last, are there and were checked."""
        return self._from_any(lambda copy: self._read(copy, ranges))

    def _read(self, copy: Copy, ranges: Sequence[tuple[int, int]]) -> memoryview:
        near = copy.agent == self._mine
        data = Slot(Path(copy.path)).bytes if near else memoryview(
            mmap.mmap(-1, self._end))  # only what is filled takes memory
        connection = connect(copy.agent, self._token, patience=READ_SECONDS)
        try:
            hashes = connection.ask({"op": "read", "part": copy.part,
                                     "blocks": {"ranges": ranges, "bytes": not near}})["hashes"]
            for first, last in ranges if not near else ():
                start, end = block_range(first, last, self._end)
                connection.receive_into(data[start:end])
        finally:
            connection.close()
        blocks = [block for first, last in ranges for block in range(first, last + 1)]
        if not np.array_equal(hash_blocks(data, self._end, blocks), np.array(hashes, dtype=np.uint64)):
            raise ValueError("its content is damaged")
        return data

    def _from_any(self, read: Any) -> Any:
        problems = []
        for copy in self._copies:
            try:
                return read(copy)
            except (OSError, ValueError, LookupError, TypeError) as error:
                problems.append(f"{copy.origin} at {copy.agent.host}:{copy.agent.port}: {error}")
        first = self._copies[0]
        raise CheckpointError(f"the part of rank {first.rank} is lost ({'; '.join(problems)})"[:500],
                              where=f"memory tier, step {first.step}", mend=MEND)
