"""Agree on the rule by which the ranks share each tensor of a state, and on who writes what they hold in common.

Ranks with the same tensors and the same meshes have the same table of them: all of them, or those of one pipeline
stage. They compare hashes, and one of each kind sends its table. So a rank learns where every part of a thousand ranks
is without being told about any part, and no rank plans for all.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from tidewheel.checkpoint.peers import Peers
from tidewheel.checkpoint.sharding import Box, Cut, Sharding
from tidewheel.checkpoint.staging import dtype_name, local
from tidewheel.checkpoint.tensor_entry import DTYPES, TensorEntry
from tidewheel.errors import CheckpointError
from tidewheel.storage import content_hash


@dataclass(frozen=True)
class Row:
    """One tensor as a rank sees it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    copies: tuple[Cut, ...]
    """Replicas, as cuts without a dimension (-1)."""
    first: int
    """First rank of its mesh; -1: every rank with this table has the whole tensor."""


Table = tuple[Row, ...]


class Agreement:
    """The rules of a state's tensors, agreed once and kept until the state has other tensors."""

    def __init__(self) -> None:
        self._digests: list[str] = []
        self._entries: dict[str, TensorEntry] = {}

    def rules(self, peers: Peers, flat: Mapping[str, torch.Tensor]) -> dict[str, TensorEntry]:
        """Return the rule of each tensor of all ranks, by name; all ranks call this together and get the same.

        Args:
            peers: the ranks, always the same.
            flat: this rank's tensors by path, see `staging.flatten`.

        Raises:
            CheckpointError: two ranks have different tensors of one name, or a rank has a tensor that is placed in a
                way that has no rule; raised on all ranks.
        """
        table: Table = ()
        own: str | CheckpointError
        try:
            table = table_of(flat, peers.ranks)
            own = _digest(table)
        except CheckpointError as error:  # the other ranks wait for this rank's answer
            own = error
        digests = []
        for rank, answer in enumerate(peers.all(own)):
            if isinstance(answer, CheckpointError):
                raise CheckpointError(f"rank {rank}: {answer.what}", where=answer.where, fix=answer.fix)
            digests.append(answer)
        if digests != self._digests:
            members: dict[str, list[int]] = defaultdict(list)
            for rank, digest in enumerate(digests):
                members[digest].append(rank)
            tables = [(peers.from_rank(ranks[0], table), ranks) for ranks in members.values()]
            self._entries, self._digests = shared_by(tables), digests
        return self._entries


def table_of(flat: Mapping[str, torch.Tensor], ranks: Sequence[int]) -> Table:
    """Return this rank's table of tensors, by name.

    Args:
        flat: tensors by path.
        ranks: global ranks of the peers, in order.

    Raises:
        CheckpointError: a tensor is placed in a way that has no rule.
    """
    number = {rank: index for index, rank in enumerate(ranks)}
    meshes: dict[DeviceMesh, tuple[int, tuple[int, ...]]] = {}
    rows = []
    for name, tensor in sorted(flat.items()):
        dtype, shape = dtype_name(tensor), tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            rows.append(Row(name, dtype, shape, (), (), -1))
            continue
        mesh = tensor.device_mesh
        if mesh.get_coordinate() is None:
            continue
        if mesh not in meshes:
            meshes[mesh] = _strides(mesh, number, name)
        first, strides = meshes[mesh]
        cuts, copies = _placed(tensor, strides, name)
        rows.append(Row(name, dtype, shape, cuts, copies, first))
    return tuple(rows)


def own_box(tensor: torch.Tensor) -> Box:
    """Return this rank's part of a tensor, as torch places it."""
    if not isinstance(tensor, DTensor):
        return Box.whole(tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(tuple(offsets), tuple(sizes))


def shared_by(tables: Iterable[tuple[Table, Sequence[int]]]) -> dict[str, TensorEntry]:
    """Return the rule of each tensor, with replicas shared out so that all ranks write about as much.

    Args:
        tables: each table with the ranks that have it.

    Raises:
        CheckpointError: tables disagree about a tensor.
    """
    entries: dict[str, TensorEntry] = {}
    loads: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for table, ranks in tables:
        for row in table:
            known = entries.get(row.name)
            if known is not None:
                if (known.dtype, known.shape) != (row.dtype, row.shape):
                    raise CheckpointError(f"{row.name} is {known.dtype} {list(known.shape)} on one rank, {row.dtype} "
                                          f"{list(row.shape)} on another", where="checkpoint", fix="rename one")
                continue
            heap = _least_loaded(loads, _candidates(row, ranks))
            load, first = heap[0]
            size = math.prod(row.shape) * DTYPES[row.dtype][1] // math.prod(cut.pieces for cut in row.cuts)
            heapq.heapreplace(heap, (load + size, first))
            entries[row.name] = TensorEntry(row.dtype, row.shape, shared=Sharding(row.shape, row.cuts, first))
    return entries


def _least_loaded(loads: dict[tuple[int, ...], list[tuple[int, int]]], candidates: tuple[int, ...]
                  ) -> list[tuple[int, int]]:
    """Return the heap of (bytes, rank) of the ranks that may write the first piece of a tensor."""
    if candidates not in loads:
        loads[candidates] = [(0, rank) for rank in candidates]
    return loads[candidates]


def _candidates(row: Row, ranks: Sequence[int]) -> tuple[int, ...]:
    if row.first < 0:
        return tuple(ranks)
    steps = [range(0, copy.pieces * copy.stride, copy.stride) for copy in row.copies]
    return tuple(row.first + sum(step) for step in itertools.product(*steps))


def _digest(table: Table) -> str:
    rows = [[row.name, row.dtype, row.shape, [[cut.dimension, cut.pieces, cut.stride] for cut in row.cuts],
             [[copy.pieces, copy.stride] for copy in row.copies], row.first] for row in table]
    return content_hash(json.dumps(rows).encode())


def _strides(mesh: DeviceMesh, number: Mapping[int, int], name: str) -> tuple[int, tuple[int, ...]]:
    """Return the first rank of a mesh, and how far apart its ranks are along each axis."""
    ranks = torch.tensor([number[rank] for rank in mesh.mesh.flatten().tolist()]).reshape(mesh.mesh.shape)
    first = int(ranks.flatten()[0])
    expected = torch.tensor(first)
    strides = []
    for axis, size in enumerate(ranks.shape):
        stride = int(ranks.select(axis, min(1, size - 1)).flatten()[0]) - first if size > 1 else 1
        shape = [1] * ranks.ndim
        shape[axis] = size
        expected = expected + (torch.arange(size) * stride).reshape(shape)
        strides.append(stride)
    if not torch.equal(expected.expand(ranks.shape), ranks):
        raise CheckpointError(f"the mesh of {name} has ranks that are not evenly apart: {ranks.flatten().tolist()}",
                              where="checkpoint", fix="make meshes with init_device_mesh and its slices")
    return first, tuple(strides)


def _placed(tensor: DTensor, strides: Sequence[int], name: str) -> tuple[tuple[Cut, ...], tuple[Cut, ...]]:
    """Return the cuts of a tensor in the order in which they are made, and its replicas.

    FSDP2 shards what tensor parallelism has sharded before, though its axis comes first in the mesh: `_StridedShard`.
    """
    cuts: list[Cut] = []
    late: list[Cut] = []
    copies: list[Cut] = []
    for axis, placement in enumerate(tensor.placements):
        pieces, stride = tensor.device_mesh.size(axis), strides[axis]
        if isinstance(placement, _StridedShard):
            late.insert(0, Cut(placement.dim, pieces, stride))
        elif isinstance(placement, Shard):
            cuts.append(Cut(placement.dim, pieces, stride))
        elif isinstance(placement, Replicate):
            copies.append(Cut(-1, pieces, stride))
        else:
            raise CheckpointError(f"{name} is placed as {placement}, which a checkpoint cannot hold",
                                  where="checkpoint", fix="give tensors that are sharded or replicated")
    shared = Sharding(tuple(tensor.shape), tuple(cut for cut in (*cuts, *late) if cut.pieces > 1))
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    place = sum(index * stride for index, stride, placement in zip(coordinate, strides, tensor.placements)
                if not isinstance(placement, Replicate))
    _check(tensor, shared, place, name)
    return shared.cuts, tuple(copy for copy in copies if copy.pieces > 1)


def _check(tensor: DTensor, shared: Sharding, place: int, name: str) -> None:
    """Raise CheckpointError unless the rule gives this rank the part that it has."""
    box, held = shared.on(place), own_box(tensor)
    if (box is not None or held.elements) and (box != held or tuple(local(tensor).shape) != held.sizes) and (
            math.prod(tensor.shape)):
        raise CheckpointError(f"{name} of shape {list(tensor.shape)} is placed as {tensor.placements}; this rank has "
                              f"{list(local(tensor).shape)} of it, and no rule gives it that part", where="checkpoint",
                              fix="shard a dimension that the number of ranks divides")
