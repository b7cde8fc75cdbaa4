"""The rule by which a tensor is shared among ranks, from which the position of every part follows.

A list of the parts of a model with 1,000 ranks has a million entries. A rule has a few numbers for each tensor: the
cuts, and how far apart the ranks are that hold neighbouring pieces. Does not import torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A part of a tensor."""

    offsets: tuple[int, ...]
    """First index in each dimension."""
    sizes: tuple[int, ...]
    """Shape."""

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that is a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def common(self, other: Box) -> Box | None:
        """Return the box that both contain; None if they have no element in common."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(min(mine + size, theirs + length) - offset for mine, size, theirs, length, offset in zip(
            self.offsets, self.sizes, other.offsets, other.sizes, offsets))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def cut(self, dimension: int, pieces: int, index: int) -> Box:
        """Return one of the pieces into which `torch.chunk` cuts the box; those behind the last row are empty.

        Args:
            dimension: that is cut.
            pieces: number of pieces.
            index: of the piece to return.
        """
        rows = self.sizes[dimension]
        most = -(-rows // pieces)
        first = min(index * most, rows)
        last = min(first + most, rows)
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dimension] += first
        sizes[dimension] = last - first
        return Box(tuple(offsets), tuple(sizes))


@dataclass(frozen=True)
class Cut:
    """One cut of a tensor. Its pieces are on ranks `stride` apart."""

    dimension: int
    pieces: int
    stride: int


@dataclass(frozen=True)
class Sharding:
    """Where each piece of a tensor is: the cuts are made one after the other, each cutting all pieces of the last.

    The piece with indices i, j, ... is on rank `first` + i * (stride of the first cut) + j * (of the second) + ...
    """

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    cuts: tuple[Cut, ...] = ()
    first: int = 0
    """Rank of the first piece."""

    def __post_init__(self) -> None:
        """Check the rule.

        Raises:
            ValueError: a cut is outside the tensor, or two pieces would be on one rank.
        """
        reach = 0
        for cut in sorted(self.cuts, key=lambda cut: cut.stride):
            if not 0 <= cut.dimension < len(self.shape) or cut.pieces < 1 or cut.stride < 1:
                raise ValueError(f"{cut} does not cut a tensor of shape {list(self.shape)}")
            if cut.pieces > 1 and cut.stride <= reach:
                raise ValueError("two pieces are on one rank")
            reach += (cut.pieces - 1) * cut.stride

    @property
    def last(self) -> int:
        """Rank of the last piece."""
        return self.first + sum((cut.pieces - 1) * cut.stride for cut in self.cuts)

    def on(self, rank: int) -> Box | None:
        """Return the piece on a rank; None if it has none. A tensor without elements is on the first rank alone."""
        if not math.prod(self.shape):
            return Box.whole(self.shape) if rank == self.first else None
        rest = rank - self.first
        indices = [0] * len(self.cuts)
        for number in sorted(range(len(self.cuts)), key=lambda number: -self.cuts[number].stride):
            cut = self.cuts[number]
            indices[number] = min(max(rest, 0) // cut.stride, cut.pieces - 1)
            rest -= indices[number] * cut.stride
        if rest:
            return None
        box = Box.whole(self.shape)
        for cut, index in zip(self.cuts, indices):
            box = box.cut(cut.dimension, cut.pieces, index)
        return box if box.elements else None

    def within(self, wanted: Box) -> Iterator[tuple[int, Box]]:
        """Yield (rank, piece) for each piece that has an element of `wanted`, without looking at most others."""
        pieces = [(self.first, Box.whole(self.shape))]
        for cut in self.cuts:
            pieces = list(itertools.chain.from_iterable(_of_cut(rank, box, cut, wanted) for rank, box in pieces))
        for rank, box in pieces:
            if box.common(wanted) is not None:
                yield rank, box


def _of_cut(rank: int, box: Box, cut: Cut, wanted: Box) -> Iterator[tuple[int, Box]]:
    """Yield the pieces of one box, with their ranks, that may have an element of `wanted`."""
    rows = box.sizes[cut.dimension]
    most = max(1, -(-rows // cut.pieces))
    begin = wanted.offsets[cut.dimension] - box.offsets[cut.dimension]
    end = min(begin + wanted.sizes[cut.dimension], rows)
    for index in range(max(0, begin) // most, min(cut.pieces, -(-end // most))):
        yield rank + index * cut.stride, box.cut(cut.dimension, cut.pieces, index)
