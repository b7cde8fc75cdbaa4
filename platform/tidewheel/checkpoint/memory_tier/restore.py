"""Load a complete step from the agents' memory into any layout and number of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from tidewheel.checkpoint.dcp import load_planner, put_in_place
from tidewheel.checkpoint.memory_tier.inventory import (
    Copy,
    Inventory,
    Recoverable,
    candidates,
    inventory,
    newest_complete,
)
from tidewheel.checkpoint.memory_tier.part_reader import FALLBACK, PartReader
from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.checkpoint.memory_tier.slots import BLOCK_BYTES
from tidewheel.checkpoint.memory_tier.table import Piece
from tidewheel.checkpoint.staging import flatten, without_absent
from tidewheel.errors import CheckpointError

__all__ = ["Inventory", "Recoverable", "candidates", "describe", "inventory", "load", "newest_complete"]

READERS = 4
"""Windows read at a time."""
WINDOW_BYTES = 32 << 20
"""Neighbouring boxes are read together, up to this length."""


@dataclass(frozen=True)
class Request:
    """A box that this rank needs, and the bytes [start, end) of the slot that contain it."""

    item: ReadItem
    piece: Piece
    start: int
    end: int

    @classmethod
    def of(cls, item: ReadItem, piece: Piece) -> Request:
        """Return the request for the rows of `piece` that contain `item`; they are contiguous."""
        if not piece.sizes:
            return cls(item, piece, piece.start, piece.start + piece.bytes)
        row_bytes = piece.bytes // piece.sizes[0] if piece.sizes[0] else 0
        start = piece.start + item.storage_offsets[0] * row_bytes
        return cls(item, piece, start, start + item.lengths[0] * row_bytes)


def load(recoverable: Recoverable, state: dict[str, Any], *, process_group: Any = None,
         own_agent: Address | None = None) -> dict[str, Any]:
    """Fill the tensors of `state` in place, whatever layout wrote the step, and return its `extra`.

    Every byte is checked against its hash before it is used. When one copy of a part is damaged or lost, another is
    read. A rank reads only what it needs, from its own node by memory map and from other nodes over TCP.

    Args:
        recoverable: the step.
        state: nested dict of tensors.
        process_group: all ranks of it raise when one does; None: no collective, each rank's outcome is its own.
        own_agent: the agent of this node.

    Raises:
        CheckpointError: a part is damaged or gone in all copies, or the state does not fit. The tensors may have been
            changed.
    """
    problem: CheckpointError | None = None
    extra: dict[str, Any] = {}
    try:
        extra = _load(recoverable, state, own_agent)
    except CheckpointError as error:
        problem = error
    if process_group is not None:
        problems: list[CheckpointError | None] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(problems, problem, group=process_group)
        problem = problem or next((other for other in problems if other is not None), None)
    if problem is not None:
        raise problem
    return extra


def describe(recoverable: Recoverable) -> dict[str, Any] | None:
    """Return the `extra` of a step without its tensors; None if it is damaged or gone, as a load then reports."""
    part = PartReader(recoverable.copies[0], recoverable.run_token, None)
    try:
        part.describe()
    except CheckpointError:
        return None
    finally:
        part.close()
    return part.extra


def _load(recoverable: Recoverable, state: dict[str, Any], own_agent: Address | None) -> dict[str, Any]:
    flat = flatten(state)
    where = f"memory tier, step {recoverable.step}"
    parts = [PartReader(_near(copies, own_agent), recoverable.run_token, own_agent) for copies in recoverable.copies]
    with ThreadPoolExecutor(READERS, thread_name_prefix="memory tier") as pool:
        try:
            list(pool.map(PartReader.describe, parts))
            plan, planner, sources = _plan(flat, parts, where)
            requests: dict[int, list[Request]] = defaultdict(list)
            for item in plan:
                assert item.storage_index.offset is not None
                rank, piece = sources[item.storage_index.fqn, tuple(item.storage_index.offset)]
                requests[rank].append(Request.of(item, piece))
            windows = [(parts[rank], window) for rank, boxes in requests.items() for window in _windows(boxes)]
            list(pool.map(lambda work: _fill(work[0], work[1], planner), windows))
        finally:
            for part in parts:
                part.close()
    return parts[0].extra


def _near(copies: Sequence[Copy], own_agent: Address | None) -> list[Copy]:
    return sorted(copies, key=lambda copy: copy.agent != own_agent)


def _plan(flat: Mapping[str, torch.Tensor], parts: Sequence[PartReader],
          where: str) -> tuple[list[ReadItem], Any, dict[tuple[str, tuple[int, ...]], tuple[int, Piece]]]:
    """Return what this rank reads, the planner, and for each box the part and piece to read it from (nearest first)."""
    sources: dict[tuple[str, tuple[int, ...]], tuple[int, Piece]] = {}
    boxes: dict[str, list[Piece]] = defaultdict(list)
    for rank in sorted(range(len(parts)), key=lambda rank: not parts[rank].near):
        for piece in parts[rank].pieces:
            if (piece.name, piece.offsets) not in sources:
                sources[piece.name, piece.offsets] = rank, piece
                boxes[piece.name].append(piece)
    flat = without_absent(dict(flat), boxes)
    for name, tensor in flat.items():
        if name not in boxes:
            raise CheckpointError(f"{name} is not in the snapshot", where=where, fix=FALLBACK)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if boxes[name][0].dtype != dtype or boxes[name][0].shape != tuple(tensor.shape):
            raise CheckpointError(f"{name} is {boxes[name][0].dtype} {list(boxes[name][0].shape)} in the snapshot, "
                                  f"{dtype} {list(tensor.shape)} in the run", where=where, fix=FALLBACK)
        if sum(piece.bytes for piece in boxes[name]) != tensor.numel() * tensor.element_size():
            raise CheckpointError(f"the parts of {name} do not add up to it", where=where, fix=FALLBACK)
    metadata = Metadata({name: TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, pieces[0].dtype)), size=torch.Size(pieces[0].shape),
        chunks=[ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in pieces])
        for name, pieces in boxes.items()})
    planner = load_planner()
    planner.set_up_planner(dict(flat), metadata, is_coordinator=True)
    return list(planner.create_local_plan().items), planner, sources


def _windows(requests: Iterable[Request]) -> list[list[Request]]:
    """Group neighbouring requests that are read together, up to `WINDOW_BYTES`."""
    windows: list[list[Request]] = []
    for request in sorted(requests, key=lambda request: request.start):
        last = windows[-1] if windows else []
        if last and request.start - last[-1].end < BLOCK_BYTES and request.end - last[0].start <= WINDOW_BYTES:
            last.append(request)
        else:
            windows.append([request])
    return windows


@torch.no_grad()
def _fill(part: PartReader, window: Sequence[Request], planner: Any) -> None:
    """Read a window and copy its boxes into the tensors."""
    first = window[0].start
    data = part.read(first, max(request.end for request in window))
    for request in window:
        item, piece = request.item, request.piece
        sizes, offsets = list(piece.sizes), list(item.storage_offsets)
        if sizes:
            sizes[0], offsets[0] = item.lengths[0], 0
        length = request.end - request.start
        box = torch.frombuffer(data, dtype=torch.uint8, count=length, offset=request.start - first) if length else (
            torch.empty(0, dtype=torch.uint8))
        tensor = box.view(getattr(torch, piece.dtype)).view(sizes)
        put_in_place(planner, item, tensor, offsets)
