"""The table of a slot: each tensor of one worker's part of the state with its position, and the rules of all tensors.

From the rules, a reader knows which worker has what, and asks no other for its table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidewheel.checkpoint.memory_tier.slots import HEADER_BYTES
from tidewheel.checkpoint.tensor_entry import DTYPES, TensorEntry, entry_json, parse_entry

ALIGNMENT = 64


@dataclass(frozen=True)
class Piece:
    """One box of a tensor and the position of its bytes in the slot, in row-major order."""

    name: str
    """Path in the state, "model/embedding.weight"."""
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """First index of the box in each dimension."""
    sizes: tuple[int, ...]
    """Shape of the box."""
    start: int = 0
    """First byte in the slot."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype][1]

    @property
    def bytes(self) -> int:
        """Bytes of the box."""
        return math.prod(self.sizes) * self.itemsize


def lay_out(pieces: Sequence[Piece], rules: Mapping[str, TensorEntry],
            holders: Sequence[int] = ()) -> tuple[bytes, list[Piece], int]:
    """Lay out the pieces behind the table.

    Args:
        pieces: of this worker.
        rules: of the tensors of all workers, by name; empty: not known.
        holders: for each worker, the first that holds the same part; empty: not known, or nobody's is another's.

    Returns:
        the table as JSON; the pieces with their `start`; the byte at which the last one ends.
    """
    end = 0
    relative = []
    for piece in pieces:
        end += -end % ALIGNMENT
        relative.append(end)
        end += piece.bytes
    # starts in the table are relative to the first tensor, whose position depends on the table's own length
    rows = [[piece.name, piece.dtype, piece.shape, piece.offsets, piece.sizes, start]
            for piece, start in zip(pieces, relative)]
    shared = {name: entry_json(entry) for name, entry in rules.items()}
    table = {"pieces": rows, "rules": shared, **({"holders": list(holders)} if holders else {})}
    text = json.dumps(table, separators=(",", ":")).encode()
    first = tensors_start(len(text))
    placed = [Piece(piece.name, piece.dtype, piece.shape, piece.offsets, piece.sizes, first + start)
              for piece, start in zip(pieces, relative)]
    return text, placed, first + end


def tensors_start(table_bytes: int) -> int:
    """Return the byte at which the tensors begin in a slot with a table of this length."""
    end = HEADER_BYTES + table_bytes
    return end + -end % ALIGNMENT


def parse(text: bytes, end: int) -> tuple[list[Piece], dict[str, TensorEntry]]:
    """Return the pieces and the rules of a table, having checked every field.

    Args:
        text: the table as JSON.
        end: the byte at which the tensors end.

    Raises:
        ValueError: the table is damaged.
    """
    first = tensors_start(len(text))
    pieces = []
    try:
        table = json.loads(text)
        for name, dtype, shape, offsets, sizes, start in table["pieces"]:
            piece = Piece(str(name), dtype, _counts(shape), _counts(offsets), _counts(sizes), first + _count(start))
            inside = dtype in DTYPES and len(shape) == len(offsets) == len(sizes) and all(
                offset + size <= whole for offset, size, whole in zip(piece.offsets, piece.sizes, piece.shape))
            if not inside or piece.start + piece.bytes > end:
                raise ValueError(f"a part of {name} lies outside the tensor or its slot")
            pieces.append(piece)
        rules = {name: parse_entry(name, entry) for name, entry in table["rules"].items()}
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"not a table of tensors: {error}") from None
    return pieces, rules


def parse_holders(text: bytes) -> list[int]:
    """Return for each worker the first that holds the same part, as `lay_out` was given; empty if it was not.

    Raises:
        ValueError: the table is damaged.
    """
    try:
        return [_count(value) for value in json.loads(text).get("holders", [])]
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not a table of tensors: {error}") from None


def _counts(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(_count(value) for value in values)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is not a count")
    return value
