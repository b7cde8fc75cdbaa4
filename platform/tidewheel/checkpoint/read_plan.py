"""Decide which worker reads which file of a checkpoint, and on which way its bytes reach the workers that need them.

Every rank computes the same plan from what each rank needs. Does not import torch.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Scope = Literal["all", "node", "off"]
"""Who shares reads: all workers, those of each node, or nobody."""
Needs = dict[int, list[tuple[int, int]]]
"""By index of a file: ranges [first, last) of its pieces that a rank needs, ascending and apart."""


@dataclass(frozen=True)
class Stream:
    """One file that one rank reads, for itself and others."""

    file: int
    """Index of the file."""
    reader: int
    needed_by: Mapping[int, Sequence[tuple[int, int]]]
    """Ranges of pieces by rank. The reader reads all pieces even so, to compare the file's hash."""

    def receivers(self, piece: int) -> tuple[int, ...]:
        """Return the ranks that need a piece, without the reader."""
        return tuple(rank for rank in self.needed_by if rank != self.reader and covers(self.needed_by[rank], piece))


def covers(ranges: Sequence[tuple[int, int]], piece: int) -> bool:
    """Return whether a piece is in one of the ranges."""
    return any(first <= piece < last for first, last in ranges)


def ranges_of(pieces: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ranges [first, last) of ascending numbers."""
    ranges: list[tuple[int, int]] = []
    for piece in pieces:
        if ranges and ranges[-1][1] == piece:
            ranges[-1] = (ranges[-1][0], piece + 1)
        else:
            ranges.append((piece, piece + 1))
    return ranges


def plan(lengths: Sequence[int], needs: Sequence[Needs], nodes: Sequence[str], scope: Scope) -> list[Stream]:
    """Return who reads each file: once for all ranks, or once for the ranks of each node that needs it.

    A file is read by a rank that needs the most of it; of several, by the one that has the least to read. A file that
    nobody needs is read once, to compare its hash.

    Args:
        lengths: bytes of each file.
        needs: what each rank needs, by rank.
        nodes: name of each rank's node.
        scope: who shares reads.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        groups["" if scope == "all" else node].append(rank)
    streams: list[Stream] = []
    load = [0] * len(needs)
    read: set[int] = set()
    for ranks in groups.values():
        needed_by: dict[int, dict[int, list[tuple[int, int]]]] = defaultdict(dict)
        for rank in ranks:
            for file, ranges in needs[rank].items():
                needed_by[file][rank] = ranges
        for file, by_rank in sorted(needed_by.items(), key=lambda item: (-lengths[item[0]], item[0])):
            most = max(map(_count, by_rank.values()))
            reader = min((rank for rank in by_rank if _count(by_rank[rank]) == most), key=lambda rank: load[rank])
            load[reader] += lengths[file]
            read.add(file)
            streams.append(Stream(file, reader, by_rank))
    least = [(bytes_, rank) for rank, bytes_ in enumerate(load)]
    heapq.heapify(least)
    for file in range(len(lengths)):
        if file not in read:
            bytes_, reader = least[0]
            heapq.heapreplace(least, (bytes_ + lengths[file], reader))
            streams.append(Stream(file, reader, {}))
    return streams


def _count(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(last - first for first, last in ranges)


@dataclass(frozen=True)
class Hop:
    """One rank's place on the way of a piece."""

    source: int | None
    """The rank that sends it to this one; None for the reader."""
    targets: tuple[int, ...]
    """Ranks that this one sends it to."""


def hop(rank: int, reader: int, receivers: Sequence[int], nodes: Sequence[str]) -> Hop:
    """Return the place of a rank on the way of a piece: a tree over the nodes, and a tree within each node.

    So a piece reaches each node once, and no rank sends it more than four times.

    Args:
        rank: the rank, the reader or a receiver.
        reader: the rank that has the piece.
        receivers: the ranks that need it, without the reader.
        nodes: name of each rank's node.
    """
    by_node: dict[str, list[int]] = {nodes[reader]: [reader]}
    for receiver in receivers:
        by_node.setdefault(nodes[receiver], []).append(receiver)
    heads = [ranks[0] for ranks in by_node.values()]
    local = by_node[nodes[rank]]
    source, targets = _in_tree(local, rank)
    if rank == local[0]:
        source, far = _in_tree(heads, rank)
        targets = far + targets
    return Hop(source, tuple(targets))


def _in_tree(members: Sequence[int], rank: int) -> tuple[int | None, list[int]]:
    """Return the parent and the children of a rank in a binary tree; the first member is the root."""
    index = members.index(rank)
    source = members[(index - 1) // 2] if index else None
    return source, list(itertools.islice(members, 2 * index + 1, 2 * index + 3))
