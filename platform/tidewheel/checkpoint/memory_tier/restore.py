"""Load the newest state that is whole somewhere in the agents' memory, into ranks of any layout and number."""

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
from tidewheel.checkpoint.memory_tier.find import (
    MEND,
    Copy,
    Inventory,
    PartReader,
    Recoverable,
    candidates,
    inventory,
    newest_complete,
)
from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.checkpoint.memory_tier.slots import BLOCK_BYTES
from tidewheel.checkpoint.memory_tier.table import Piece
from tidewheel.checkpoint.staging import flatten
from tidewheel.errors import CheckpointError

__all__ = ["Inventory", "Recoverable", "candidates", "inventory", "load", "newest_complete"]

READERS = 4
WINDOW_BYTES = 32 << 20


@dataclass(frozen=True)
class Wanted:
    """A box that this rank needs, and the bytes [start, end) of a part that it is in."""

    item: ReadItem
    piece: Piece
    start: int
    end: int

    @classmethod
    def of(cls, item: ReadItem, piece: Piece) -> Wanted:
        """The rows of `piece` that `item` is in: they lie together."""
        if not piece.sizes:
            return cls(item, piece, piece.start, piece.start + piece.bytes)
        row_bytes = piece.bytes // piece.sizes[0] if piece.sizes[0] else 0
        start = piece.start + item.storage_offsets[0] * row_bytes
        return cls(item, piece, start, start + item.lengths[0] * row_bytes)


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
    parts = [PartReader(_near(copies, mine), recoverable.run_token, mine) for copies in recoverable.copies]
    with ThreadPoolExecutor(READERS, thread_name_prefix="memory tier") as pool:
        try:
            list(pool.map(PartReader.describe, parts))
            plan, planner, places = _plan(flat, parts, where)
            wanted: dict[int, list[Wanted]] = defaultdict(list)
            for item in plan:
                assert item.storage_index.offset is not None
                rank, piece = places[item.storage_index.fqn, tuple(item.storage_index.offset)]
                wanted[rank].append(Wanted.of(item, piece))
            windows = [(parts[rank], window) for rank, items in wanted.items() for window in _windows(items)]
            list(pool.map(lambda each: _fill(each[0], each[1], planner), windows))
        finally:
            for part in parts:
                part.close()
    return parts[0].extra


def _near(copies: Sequence[Copy], mine: Address | None) -> list[Copy]:
    return sorted(copies, key=lambda copy: copy.agent != mine)


def _plan(flat: Mapping[str, torch.Tensor], parts: Sequence[PartReader],
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


def _windows(items: Iterable[Wanted]) -> list[list[Wanted]]:
    """What is read at once: neighbours, up to `WINDOW_BYTES`."""
    found: list[list[Wanted]] = []
    for each in sorted(items, key=lambda wanted: wanted.start):
        last = found[-1] if found else []
        if last and each.start - last[-1].end < BLOCK_BYTES and each.end - last[0].start <= WINDOW_BYTES:
            last.append(each)
        else:
            found.append([each])
    return found


@torch.no_grad()
def _fill(part: PartReader, window: Sequence[Wanted], planner: Any) -> None:
    """Read what is wanted and copy it into place."""
    first = window[0].start
    data = part.read(first, max(each.end for each in window))
    for each in window:
        item, piece = each.item, each.piece
        sizes, offsets = list(piece.sizes), list(item.storage_offsets)
        if sizes:
            sizes[0], offsets[0] = item.lengths[0], 0
        box = torch.empty(0, dtype=torch.uint8) if each.end == each.start else torch.frombuffer(
            data, dtype=torch.uint8, count=each.end - each.start, offset=each.start - first)
        tensor = box.view(getattr(torch, piece.dtype)).view(sizes)
        put_in_place(planner, item, tensor, offsets)
