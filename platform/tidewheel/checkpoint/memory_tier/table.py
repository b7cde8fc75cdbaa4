"""The tensors of one worker's part of the state, and where they lie in its slots."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tidewheel.checkpoint.manifest import DTYPES
from tidewheel.checkpoint.memory_tier.slots import HEADER_BYTES

ALIGNMENT = 64


@dataclass(frozen=True)
class Piece:
    """One box of a tensor and where its bytes lie in the slot, in row-major order."""

    name: str
    """Path in the state, "model/embedding.weight"."""
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype][1]

    @property
    def bytes(self) -> int:
        """Of the box."""
        return math.prod(self.sizes) * self.itemsize


def place(pieces: Sequence[Piece]) -> tuple[bytes, list[Piece], int]:
    """Give each piece its place behind the table.

    Returns:
        the table as JSON; the pieces with their places; the byte at which they end.
    """
    at = 0
    relative = []
    for piece in pieces:
        at += -at % ALIGNMENT
        relative.append(at)
        at += piece.bytes
    # starts are counted from where the tensors begin, which follows from the table's own length
    rows = [[piece.name, piece.dtype, piece.shape, piece.offsets, piece.sizes, start]
            for piece, start in zip(pieces, relative)]
    text = json.dumps(rows, separators=(",", ":")).encode()
    first = tensors_start(len(text))
    placed = [Piece(piece.name, piece.dtype, piece.shape, piece.offsets, piece.sizes, first + start)
              for piece, start in zip(pieces, relative)]
    return text, placed, first + at


def tensors_start(table_bytes: int) -> int:
    """Where the tensors begin in a slot with a table of this length."""
    end = HEADER_BYTES + table_bytes
    return end + -end % ALIGNMENT


def parse(text: bytes, end: int) -> list[Piece]:
    """The pieces of a table, every field checked.

    Args:
        end: the byte at which the tensors end.

    Raises:
        ValueError: it is damaged.
    """
    first, found = tensors_start(len(text)), []
    try:
        for name, dtype, shape, offsets, sizes, start in json.loads(text):
            piece = Piece(str(name), dtype, _counts(shape), _counts(offsets), _counts(sizes), first + _count(start))
            inside = dtype in DTYPES and len(shape) == len(offsets) == len(sizes) and all(
                offset + size <= whole for offset, size, whole in zip(piece.offsets, piece.sizes, piece.shape))
            if not inside or piece.start + piece.bytes > end:
                raise ValueError(f"a part of {name} lies outside the tensor or its slot")
            found.append(piece)
    except (TypeError, LookupError) as error:
        raise ValueError(f"not a table of tensors: {error}") from None
    return found


def _counts(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(_count(value) for value in values)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is not a count")
    return value
