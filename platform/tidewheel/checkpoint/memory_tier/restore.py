"""Load a complete step from the agents' memory into any layout and number of ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from tidewheel.checkpoint.agreement import own_box
from tidewheel.checkpoint.filling import Request, fill_window, windows
from tidewheel.checkpoint.folding import Folding
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
from tidewheel.checkpoint.staging import dtype_name, flatten, local, without_absent
from tidewheel.checkpoint.tensor_entry import TensorEntry
from tidewheel.errors import CheckpointError

__all__ = ["Inventory", "Recoverable", "candidates", "describe", "inventory", "load", "newest_complete"]

READERS = 4
"""Windows read at a time."""


def load(recoverable: Recoverable, state: dict[str, Any], *, process_group: Any = None,
         own_agent: Address | None = None,
         on_read: Callable[[Mapping[str, int]], None] | None = None) -> dict[str, Any]:
    """Fill the tensors of `state` in place, whatever layout wrote the step, and return its `extra`.

    Every byte is checked against its hash before it is used. When one copy of a part is damaged or lost, another is
    read. A rank reads only what it needs, from its own node by memory map and from other nodes over TCP.

    Args:
        recoverable: the step.
        state: nested dict of tensors.
        process_group: all ranks of it raise when one does; None: no collective, each rank's outcome is its own.
        own_agent: the agent of this node.
        on_read: called with the bytes that all ranks have read, by the origin of the copies (`inventory.ORIGINS`).

    Raises:
        CheckpointError: a part is damaged or gone in all copies, or the state does not fit. The tensors may have been
            changed.
    """
    alone = process_group is None
    outcome: tuple[dict[str, Any] | None, Counter[str]] | CheckpointError
    try:
        outcome = _load(recoverable, state, own_agent, wants_extra=alone or dist.get_rank(process_group) == 0)
    except CheckpointError as error:
        outcome = error
    outcomes = [outcome]
    if not alone:
        outcomes *= dist.get_world_size(process_group)
        dist.all_gather_object(outcomes, outcome, group=process_group)
    extra: dict[str, Any] | None = None
    read: Counter[str] = Counter()
    for other in outcomes:
        if isinstance(other, CheckpointError):
            raise other
        extra = other[0] if extra is None else extra
        read += other[1]
    assert extra is not None
    if on_read is not None:
        on_read(read)
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


def _load(recoverable: Recoverable, state: dict[str, Any], own_agent: Address | None, *,
          wants_extra: bool) -> tuple[dict[str, Any] | None, Counter[str]]:
    """Fill the tensors; return the `extra` of the first rank, if it is wanted, and the bytes read by origin."""
    flat = flatten(state)
    where = f"memory tier, step {recoverable.step}"
    known = {rank: PartReader(_near(copies, own_agent), recoverable.run_token, own_agent)
             for rank, copies in enumerate(recoverable.copies) if copies}
    with ThreadPoolExecutor(READERS, thread_name_prefix="memory tier") as pool:
        try:
            first = [part for part in known.values() if part.near] or [known[0]]
            list(pool.map(PartReader.describe, first))
            parts = _with_copies(known, recoverable, first[0], where)
            folding = Folding(flat, _stored(first))
            flat = folding.tensors
            others = _needed(flat, parts, first, where)
            if wants_extra and parts[0] not in first:
                others.add(0)
            list(pool.map(PartReader.describe, dict.fromkeys(parts[rank] for rank in sorted(others))))
            requests = _requests(flat, parts, where)
            work = [(parts[rank], window) for rank, wanted in requests.items()
                    for window in windows(wanted, BLOCK_BYTES)]
            list(pool.map(lambda item: _fill(*item), work))
            folding.add_up()
        finally:
            for part in known.values():
                part.close()
    return known[0].extra if wants_extra else None, sum((part.read_bytes for part in known.values()), Counter())


def _with_copies(known: Mapping[int, PartReader], recoverable: Recoverable, described: PartReader,
                 where: str) -> list[PartReader]:
    """Return the part of each rank; of one that is lost, that of a rank which holds the same."""
    holders: Sequence[int] = described.holders() if recoverable.lost else range(recoverable.world_size)
    if len(holders) != recoverable.world_size:
        raise CheckpointError("a part is lost, and who has a copy of it is not known", where=where, fix=FALLBACK)
    by_holder = {holders[rank]: part for rank, part in sorted(known.items(), key=lambda item: item[1].near)}
    if missing := [rank for rank in recoverable.lost if holders[rank] not in by_holder]:
        raise CheckpointError(f"the parts of ranks {missing} are lost, with all copies", where=where, fix=FALLBACK)
    return [known.get(rank) or by_holder[holders[rank]] for rank in range(recoverable.world_size)]


def _stored(parts: Sequence[PartReader]) -> dict[str, TensorEntry | Piece]:
    """Return what some parts tell about the whole tensors, by path."""
    stored: dict[str, TensorEntry | Piece] = {}
    for part in parts:
        stored |= {piece.name: piece for piece in part.pieces}
        stored |= part.rules
    return stored


def _needed(flat: Mapping[str, torch.Tensor], parts: Sequence[PartReader], described: Sequence[PartReader],
            where: str) -> set[int]:
    """Return the ranks whose parts have what no described part has: all others, unless the rules are known."""
    rules = described[0].rules
    if not rules:
        return {rank for rank, part in enumerate(parts) if part not in described}
    held = {(piece.name, piece.offsets) for part in described for piece in part.pieces}
    ranks = set()
    for name, tensor in flat.items():
        rule = rules.get(name)
        if rule is None or rule.shared is None or rule.shape != tuple(tensor.shape):
            continue  # `_requests` refuses it
        if rule.shared.last >= len(parts):
            raise CheckpointError(f"{name} is shared by more ranks than there are", where=where, fix=FALLBACK)
        for rank, box in rule.shared.within(own_box(tensor)):
            if (name, box.offsets) not in held:
                ranks.add(rank)
    return ranks


def _near(copies: Sequence[Copy], own_agent: Address | None) -> list[Copy]:
    return sorted(copies, key=lambda copy: copy.agent != own_agent)


def _requests(flat: Mapping[str, torch.Tensor], parts: Sequence[PartReader], where: str) -> dict[int, list[Request]]:
    """Return what this rank reads of each part; of equal boxes, the nearest."""
    boxes: dict[str, dict[tuple[int, ...], tuple[int, Piece]]] = defaultdict(dict)
    rules: dict[str, TensorEntry] = {}
    for rank in sorted(range(len(parts)), key=lambda rank: not parts[rank].near):
        rules = rules or parts[rank].rules
        for piece in parts[rank].pieces:
            boxes[piece.name].setdefault(piece.offsets, (rank, piece))
    flat = without_absent(dict(flat), rules or boxes)
    requests: dict[int, list[Request]] = defaultdict(list)
    for name, tensor in flat.items():
        pieces = list(boxes.get(name, {}).values())
        _check(name, tensor, rules.get(name) or next((piece for _, piece in pieces), None), where)
        own, found = own_box(tensor), 0
        for rank, piece in pieces:
            request = Request.of(local(tensor), own, Box(piece.offsets, piece.sizes), getattr(torch, piece.dtype),
                                 piece.start)
            if request is not None:
                requests[rank].append(request)
                found += request.common.elements
        if found != own.elements:
            raise CheckpointError(f"the parts of {name} do not add up to it", where=where, fix=FALLBACK)
    return requests


def _check(name: str, tensor: torch.Tensor, stored: TensorEntry | Piece | None, where: str) -> None:
    if stored is None:
        raise CheckpointError(f"{name} is not in the snapshot", where=where, fix=FALLBACK)
    dtype = dtype_name(tensor)
    if stored.dtype != dtype or stored.shape != tuple(tensor.shape):
        raise CheckpointError(f"{name} is {stored.dtype} {list(stored.shape)} in the snapshot, "
                              f"{dtype} {list(tensor.shape)} in the run", where=where, fix=FALLBACK)


def _fill(part: PartReader, window: Sequence[Request]) -> None:
    data = part.read(window[0].start, max(request.end for request in window))
    fill_window(window, torch.frombuffer(data, dtype=torch.uint8))
