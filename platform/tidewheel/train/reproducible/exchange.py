"""Reduce-scatter and all-reduce of gradients in the canonical order.

Collectives that add (reduce-scatter, all-reduce) choose an order that depends on the number of ranks. Here tensors are
only moved, by all-to-all and all-gather, and the receiver adds them. An all-to-all sends as many bytes as a ring's
reduce-scatter; its receive buffer is as large as the tensor that is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tidewheel.train.parallel.mesh import GRADIENTS, Mesh
from tidewheel.train.parallel.traffic import Traffic
from tidewheel.train.reproducible.gradient_order import GradientOrder, Member
from tidewheel.train.reproducible.tree import Node, TreeSum


@dataclass(frozen=True)
class Group:
    """Ranks that exchange gradients.

    Args:
        group: process group; None: this rank alone.
        members: for each rank of the group, in order, the members whose gradients it holds: itself, or those it has
            summed over before.
        traffic: counts the bytes that are sent; None: nothing does.
    """

    group: Any
    members: tuple[tuple[Member, ...], ...]
    traffic: Traffic | None = None

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.members)

    @classmethod
    def replicas(cls, mesh: Mesh) -> Group:
        """Return the group of all ranks with whole gradients of the same parameters."""
        return cls(mesh.group(*GRADIENTS), tuple((member,) for member in _members(mesh, range(mesh.data_size))))

    @classmethod
    def shards(cls, mesh: Mesh) -> Group:
        """Return the group of ranks over which FSDP2 shards the parameters."""
        first = mesh.coordinate("replicate") * mesh.size("shard")
        ranks = range(first, first + mesh.size("shard"))
        return cls(mesh.group("shard", "context"), tuple((member,) for member in _members(mesh, ranks)))

    @classmethod
    def experts(cls, mesh: Mesh) -> Group:
        """Return the group of ranks over which FSDP2 shards the experts. Each holds the gradients of its sources."""
        first = mesh.coordinate("replicate") * mesh.size("shard")
        sources = _members(mesh, range(first, first + mesh.size("shard")))
        shares = tuple(sources[start:start + mesh.expert] for start in range(0, len(sources), mesh.expert))
        return cls(mesh.expert_shard_mesh(replicate=False).get_group(), shares)

    @classmethod
    def copies(cls, mesh: Mesh) -> Group:
        """Return the group of ranks with the same shard (HSDP)."""
        shards = mesh.size("shard")
        return cls(mesh.group("replicate"), tuple(_members(mesh, range(first, first + shards))
                                                  for first in range(0, mesh.data_size, shards)))


def _members(mesh: Mesh, data_ranks: Iterable[int]) -> tuple[Member, ...]:
    return tuple((rank, context) for rank in data_ranks for context in range(mesh.size("context")))


class PartialSum:
    """The part of one tensor's canonical sum that a rank adds up by itself.

    Args:
        order: of the model; it knows the current micro-batch.
        members: whose gradients are added after each micro-batch, in order.
        merges: False: keep the gradients of the last micro-batch only, each member's apart.
    """

    def __init__(self, order: GradientOrder, members: Sequence[Member], *, merges: bool = True) -> None:
        self._order, self._members, self._merges = order, members, merges
        self.clear()

    def clear(self) -> None:
        """Forget all gradients."""
        self.tree = TreeSum()
        self._open: dict[int, tuple[int, torch.Tensor]] = {}

    def add(self, *values: torch.Tensor) -> None:
        """Add the gradients of all members, of the current micro-batch.

        Args:
            values: of each member, overwritten.
        """
        if self._order.number == 0 or not self._merges:  # a failed step may have left partial sums
            self.clear()
        for index, (member, value) in enumerate(zip(self._members, values, strict=True)):
            if self._merges:
                self.put(member, value)
            else:
                self.tree.replace((0, index), value)

    def put(self, member: Member, value: torch.Tensor) -> None:
        """Add the gradient of one micro-batch after the others of its virtual rank."""
        leaf = self._order.leaf(member)
        count, held = self._open.pop(leaf, (0, value))
        if count:
            held.add_(value)
        if count + 1 < self._order.parts:
            self._open[leaf] = count + 1, held
        else:
            self.tree.add((0, leaf), held)

    def release(self, received: torch.Tensor) -> None:
        """Copy partial sums out of a receive buffer, so that the buffer is freed."""
        buffer = received.untyped_storage().data_ptr()
        for node, value in self.tree.nodes():
            if value.untyped_storage().data_ptr() == buffer:
                self.tree.replace(node, value.clone())
        for leaf, (count, value) in self._open.items():
            if value.untyped_storage().data_ptr() == buffer:
                self._open[leaf] = count, value.clone()

    def take(self) -> list[tuple[Node, torch.Tensor]]:
        """Return the nodes with their sums, in the order of their leaves, and forget them."""
        nodes, self.tree = self.tree.nodes(), TreeSum()
        return nodes


class OrderedSum:
    """The sum over all micro-batches and ranks of one flat tensor, such as the gradients of an FSDP unit.

    Every rank calls `add` once for each micro-batch, then `shard` or `whole` once. If it does not swap, it may add up
    the pieces of the tensor in `partial` sums instead, and `put` their nodes before `shard`.

    Args:
        order: of the model; it knows the current micro-batch.
        near: ranks that get a shard each; all hold the gradients of the same number of members.
        far: ranks with the same shard, whose sums are added last (HSDP).
    """

    def __init__(self, order: GradientOrder, near: Group, far: Group | None = None) -> None:
        self._order, self._near, self._far = order, near, far
        self._own = next((held for held in near.members if order.member in held), (order.member,))
        self._sum = PartialSum(order, self._own)

    @property
    def swaps(self) -> bool:
        """Return whether ranks exchange their gradients after every micro-batch."""
        return self._order.streams and self._near.size > 1

    def partial(self) -> PartialSum:
        """Return an empty sum of a piece of the tensor. If ranks swap, it keeps members apart."""
        return PartialSum(self._order, self._own, merges=not self.swaps)

    def put(self, nodes: Iterable[tuple[Node, torch.Tensor]]) -> None:
        """Set the sum to nodes of the canonical sum, [n] each."""
        self._sum.clear()
        for node, flat in nodes:
            self._sum.tree.add(node, flat)

    def add(self, *flats: torch.Tensor) -> None:
        """Add gradients of the current micro-batch: this rank's, or those of all members whose gradients it holds.

        Args:
            flats: [n] for each member in order, overwritten; n must be a multiple of the number of ranks of `near`.
        """
        if self._order.tap is not None:
            for member, flat in zip(self._own, flats):
                self._order.tap.add(self._order.micro(member), flat)
        if not self._order.streams:
            for flat in flats:
                if flat.is_cuda:  # allocated on another stream but kept on this one
                    flat.record_stream(torch.cuda.current_stream())
            self._sum.add(*flats)
            return
        if self._order.number == 0:  # a failed step may have left partial sums
            self._sum.clear()
        for index, flat in enumerate(flats):
            received = flat.view(1, -1) if self._near.size == 1 else _all_to_all(flat, self._near)
            parts = [(members[index], part) for members, part in zip(self._near.members, received.unbind())]
            for member, part in sorted(parts, key=lambda other: self._order.micro(other[0])):
                self._sum.put(member, part)
            self._sum.release(received)

    def shard(self) -> torch.Tensor:
        """Return this rank's part of the sum, [n / ranks of `near`]."""
        tree = self._take()
        if not self._order.streams:
            tree = _exchange(self._order, tree, self._near)
        return tree.total() if self._far is None else _all_reduce(self._order, tree, self._far)

    def whole(self) -> torch.Tensor:
        """Return the sum [n] on every rank of `near`."""
        return _all_reduce(self._order, self._take(), self._near)

    def _take(self) -> TreeSum:
        tree, self._sum.tree = self._sum.tree, TreeSum()
        return tree


def _all_to_all(flat: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's piece of every rank's `flat`, [ranks, n / ranks]."""
    received = torch.empty_like(flat)
    (group.traffic or Traffic()).all_to_all(received, flat, group.group).wait()
    return received.view(group.size, -1)


def _exchange(order: GradientOrder, tree: TreeSum, group: Group) -> TreeSum:
    """Reduce-scatter: return this rank's pieces of every rank's nodes, merged.

    Each rank knows which nodes the others have: a single one if the virtual ranks per data rank are a power of two.
    """
    if group.size == 1:
        return tree
    covers: Sequence[list[Node]] = [order.cover(members) for members in group.members]
    own_values, merged = [value for _, value in tree.nodes()], TreeSum()
    for turn in range(max(map(len, covers))):
        received = _all_to_all(own_values[min(turn, len(own_values) - 1)], group)
        for nodes, part in zip(covers, received.unbind()):
            if turn < len(nodes):
                merged.add(nodes[turn], part)
    return merged


def _all_reduce(order: GradientOrder, tree: TreeSum, group: Group) -> torch.Tensor:
    """Return the sum of all ranks' nodes on every rank. Each rank sums a piece, and the pieces are gathered."""
    if group.size == 1:
        return tree.total()
    padded, length = TreeSum(), 0
    for node, value in tree.nodes():
        length = len(value)
        missing = -length % group.size
        padded.add(node, F.pad(value, (0, missing)) if missing else value)
    piece = _exchange(order, padded, group).total()
    whole = piece.new_empty(group.size * len(piece))
    (group.traffic or Traffic()).all_gather(whole, piece.contiguous(), group.group).wait()
    return whole[:length]
