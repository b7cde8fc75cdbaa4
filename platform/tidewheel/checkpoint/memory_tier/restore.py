"""Load a complete step from the agents' memory into any layout and number of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from tidewheel.checkpoint.agreement import own_box
from tidewheel.checkpoint.filling import Request, fill_window, windows
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
from tidewheel.checkpoint.sharding import Box
from tidewheel.checkpoint.staging import dtype_name, flatten, local
from tidewheel.errors import CheckpointError

__all__ = ["Inventory", "Recoverable", "candidates", "inventory", "load", "newest_complete"]

READERS = 4
"""Windows read at a time."""


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


def _load(recoverable: Recoverable, state: dict[str, Any], own_agent: Address | None) -> dict[str, Any]:
    flat = flatten(state)
    where = f"memory tier, step {recoverable.step}"
    parts = [PartReader(_near(copies, own_agent), recoverable.run_token, own_agent) for copies in recoverable.copies]
    with ThreadPoolExecutor(READERS, thread_name_prefix="memory tier") as pool:
        try:
            list(pool.map(PartReader.describe, parts))
            requests = _requests(flat, parts, where)
            work = [(parts[rank], window) for rank, wanted in requests.items()
                    for window in windows(wanted, BLOCK_BYTES)]
            list(pool.map(lambda item: _fill(*item), work))
        finally:
            for part in parts:
                part.close()
    return parts[0].extra


def _near(copies: Sequence[Copy], own_agent: Address | None) -> list[Copy]:
    return sorted(copies, key=lambda copy: copy.agent != own_agent)


def _requests(flat: Mapping[str, torch.Tensor], parts: Sequence[PartReader], where: str) -> dict[int, list[Request]]:
    """Return what this rank reads of each part; of equal boxes, the nearest."""
    boxes: dict[str, dict[tuple[int, ...], tuple[int, Piece]]] = defaultdict(dict)
    for rank in sorted(range(len(parts)), key=lambda rank: not parts[rank].near):
        for piece in parts[rank].pieces:
            boxes[piece.name].setdefault(piece.offsets, (rank, piece))
    requests: dict[int, list[Request]] = defaultdict(list)
    for name, tensor in flat.items():
        pieces = list(boxes.get(name, {}).values())
        _check(name, tensor, [piece for _, piece in pieces], where)
        own = own_box(tensor)
        for rank, piece in pieces:
            request = Request.of(local(tensor), own, Box(piece.offsets, piece.sizes), getattr(torch, piece.dtype),
                                 piece.start)
            if request is not None:
                requests[rank].append(request)
    return requests


def _check(name: str, tensor: torch.Tensor, pieces: Sequence[Piece], where: str) -> None:
    if not pieces:
        raise CheckpointError(f"{name} is not in the snapshot", where=where, fix=FALLBACK)
    dtype = dtype_name(tensor)
    if pieces[0].dtype != dtype or pieces[0].shape != tuple(tensor.shape):
        raise CheckpointError(f"{name} is {pieces[0].dtype} {list(pieces[0].shape)} in the snapshot, "
                              f"{dtype} {list(tensor.shape)} in the run", where=where, fix=FALLBACK)
    if sum(piece.bytes for piece in pieces) != tensor.numel() * tensor.element_size():
        raise CheckpointError(f"the parts of {name} do not add up to it", where=where, fix=FALLBACK)


def _fill(part: PartReader, window: Sequence[Request]) -> None:
    data = part.read(window[0].start, max(request.end for request in window))
    fill_window(window, torch.frombuffer(data, dtype=torch.uint8))
