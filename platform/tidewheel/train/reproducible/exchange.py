"""Gradients of all ranks and micro-batches added up in the canonical order: reduce-scatter and all-reduce.

Collectives that add (reduce-scatter, all-reduce) choose their order by the number of ranks. Here tensors are only
moved, by all-to-all and all-gather, and added where they arrive. An all-to-all sends as many bytes as a ring's
reduce-scatter; its receive buffer is as large as what was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tidewheel.train.parallel.mesh import GRADIENTS, Mesh
from tidewheel.train.reproducible.gradient_order import GradientOrder, Member
from tidewheel.train.reproducible.tree import Node, TreeSum

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the first name since torch 2.13


@dataclass(frozen=True)
class Group:
    """Ranks that exchange, and what each brings."""

    group: Any
    """The process group; None: this rank alone."""
    members: tuple[tuple[Member, ...], ...]
    """For each rank of the group, in order, those whose gradients it has: itself, or a group that it has summed over
    before."""

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.members)

    @classmethod
    def replicas(cls, mesh: Mesh) -> Group:
        """All ranks that have whole gradients of the same parameters."""
        return cls(mesh.group(*GRADIENTS), tuple((member,) for member in _members(mesh, range(mesh.data_size))))

    @classmethod
    def shards(cls, mesh: Mesh) -> Group:
        """The ranks between which FSDP2 shards the parameters."""
        first = mesh.coordinate("replicate") * mesh.size("shard")
        ranks = range(first, first + mesh.size("shard"))
        return cls(mesh.group("shard", "context"), tuple((member,) for member in _members(mesh, ranks)))

    @classmethod
    def copies(cls, mesh: Mesh) -> Group:
        """HSDP: the ranks that have the same shard."""
        shards = mesh.size("shard")
        return cls(mesh.group("replicate"), tuple(_members(mesh, range(first, first + shards))
                                                  for first in range(0, mesh.data_size, shards)))


def _members(mesh: Mesh, data_ranks: Iterable[int]) -> tuple[Member, ...]:
    return tuple((rank, context) for rank in data_ranks for context in range(mesh.size("context")))


class OrderedSum:
    """The sum over all micro-batches and ranks of one flat tensor, such as the gradients of an FSDP unit.

    Every rank calls `add` once for each micro-batch, then `shard` or `whole` once.

    Args:
        order: of the model; tells which micro-batch is under way.
        near: the ranks that get a shard each.
        far: replicas: the ranks that have the same shard, whose sums are added last (HSDP).
    """

    def __init__(self, order: GradientOrder, near: Group, far: Group | None = None) -> None:
        self._order, self._near, self._far = order, near, far
        self._tree = TreeSum()
        self._open: dict[int, tuple[int, torch.Tensor]] = {}

    def add(self, flat: torch.Tensor) -> None:
        """This rank's gradient of the micro-batch under way, [n]; n must be a multiple of the ranks of `near`. The
        tensor is used up."""
        if self._order.number == 0:  # a step that failed may have left something
            self._tree, self._open = TreeSum(), {}
        if self._order.streams:
            received = self._swap(flat)
            for members, part in zip(self._near.members, received.unbind()):
                self._put(members[0], part)
            self._leave(received)
            return
        if flat.is_cuda:  # allocated on another stream, and kept on this one
            flat.record_stream(torch.cuda.current_stream())
        self._put(self._order.member, flat)

    def shard(self) -> torch.Tensor:
        """[n / ranks of `near`], this rank's part of the sum."""
        tree = self._tree if self._order.streams else _exchange(self._order, self._tree, self._near)
        self._tree = TreeSum()
        return tree.total() if self._far is None else _all_reduce(self._order, tree, self._far)

    def whole(self) -> torch.Tensor:
        """[n], the sum, on every rank of `near`."""
        tree, self._tree = self._tree, TreeSum()
        return _all_reduce(self._order, tree, self._near)

    def _put(self, member: Member, value: torch.Tensor) -> None:
        """The gradient of one micro-batch, or a part of it: behind the others of its virtual rank."""
        leaf = self._order.leaf(member)
        count, held = self._open.pop(leaf, (0, value))
        if count:
            held.add_(value)
        if count + 1 < self._order.parts:
            self._open[leaf] = count + 1, held
        else:
            self._tree.add((0, leaf), held)

    def _swap(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(1, -1) if self._near.size == 1 else _all_to_all(flat, self._near)

    def _leave(self, received: torch.Tensor) -> None:
        """Copy what is kept out of a receive buffer, so that the buffer is freed."""
        place = received.untyped_storage().data_ptr()
        for node, value in self._tree.nodes():
            if value.untyped_storage().data_ptr() == place:
                self._tree.replace(node, value.clone())
        for leaf, (count, value) in self._open.items():
            if value.untyped_storage().data_ptr() == place:
                self._open[leaf] = count, value.clone()


def _all_to_all(flat: torch.Tensor, group: Group) -> torch.Tensor:
    """[ranks, n / ranks]: this rank's piece of every rank's `flat`."""
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat, group=group.group)
    return received.view(group.size, -1)


def _exchange(order: GradientOrder, tree: TreeSum, group: Group) -> TreeSum:
    """Reduce-scatter: pieces of every rank's nodes, merged. Each rank knows which nodes the others have; where virtual
    ranks per data rank are a power of two, each has a single one."""
    if group.size == 1:
        return tree
    covers: Sequence[list[Node]] = [order.cover(members) for members in group.members]
    mine, merged = [value for _, value in tree.nodes()], TreeSum()
    for turn in range(max(map(len, covers))):
        received = _all_to_all(mine[min(turn, len(mine) - 1)], group)
        for nodes, part in zip(covers, received.unbind()):
            if turn < len(nodes):
                merged.add(nodes[turn], part)
    return merged


def _all_reduce(order: GradientOrder, tree: TreeSum, group: Group) -> torch.Tensor:
    """The sum of all ranks' nodes, on every rank: each adds up a piece, and the pieces are gathered."""
    if group.size == 1:
        return tree.total()
    padded, length = TreeSum(), 0
    for node, value in tree.nodes():
        length = len(value)
        missing = -length % group.size
        padded.add(node, F.pad(value, (0, missing)) if missing else value)
    piece = _exchange(order, padded, group).total()
    whole = piece.new_empty(group.size * len(piece))
    _all_gather(whole, piece.contiguous(), group=group.group)
    return whole[:length]
