"""Cut a checkpoint's file into pieces that are read, hashed and passed on one after the other. Does not import torch.

Every reader of a file cuts it in the same way, because the cuts follow from the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tidewheel.checkpoint.manifest import CheckpointManifest
from tidewheel.checkpoint.sharding import Box

PIECE_BYTES = 16 << 20
"""A piece has at most this many bytes of tensors, unless one element is longer."""


@dataclass(frozen=True)
class Part:
    """A box of a tensor, and where its bytes are in the file, in row-major order."""

    name: str
    box: Box
    start: int
    end: int


@dataclass(frozen=True)
class Piece:
    """Bytes [start, end) of a file, and the boxes of tensors in them."""

    start: int
    end: int
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        """Length of the piece."""
        return self.end - self.start


class OverlappingParts(Exception):
    """Two parts of a file have bytes in common, so that the file cannot be cut between them."""


def pieces_of(manifest: CheckpointManifest, index: int, limit: int = PIECE_BYTES) -> list[Piece]:
    """Return the pieces of a file, in order. Together they are the whole file, with its header.

    Args:
        manifest: of the checkpoint.
        index: of the file in `manifest.files`.
        limit: longest piece in bytes.

    Raises:
        OverlappingParts: see the class.
        CheckpointError: the file has another length than its parts.
    """
    parts: list[Part] = []
    for name, chunk in manifest.parts(index):
        start, itemsize = chunk.start, manifest.tensors[name].itemsize
        for box in _cut(chunk.box, itemsize, limit):
            end = start + box.elements * itemsize
            parts.append(Part(name, box, start, end))
            start = end
    pieces: list[Piece] = []
    begin = position = 0
    within: list[Part] = []
    for part in sorted(parts, key=lambda part: part.start):
        if part.start < position:
            raise OverlappingParts(f"{part.name} begins at {part.start}, another part ends at {position}")
        if within and part.end - begin > limit:
            pieces.append(Piece(begin, position, tuple(within)))
            begin, within = position, []
        if not within and part.start - begin > limit:  # bytes that belong to no tensor; a header is shorter
            pieces += blank(begin, part.start, limit)
            begin = part.start
        within.append(part)
        position = part.end
    if within:
        pieces.append(Piece(begin, position, tuple(within)))
    return pieces + blank(position, manifest.files[index].bytes, limit)


def _cut(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """Yield boxes of at most `limit` bytes that follow each other in the row-major order of `box`."""
    if box.elements * itemsize <= limit or box.elements <= 1:
        if box.elements:
            yield box
        return
    dimension = next(index for index, size in enumerate(box.sizes) if size > 1)
    of_row = box.elements // box.sizes[dimension] * itemsize
    step = max(1, limit // of_row)
    for first in range(0, box.sizes[dimension], step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dimension] += first
        sizes[dimension] = min(step, box.sizes[dimension] - first)
        yield from _cut(Box(tuple(offsets), tuple(sizes)), itemsize, limit)


def blank(start: int, end: int, limit: int = PIECE_BYTES) -> list[Piece]:
    """Return pieces without a part of a tensor.

    Args:
        start: first byte of the first piece.
        end: byte behind the last piece.
        limit: longest piece in bytes.
    """
    return [Piece(first, min(first + limit, end), ()) for first in range(start, end, limit)]
