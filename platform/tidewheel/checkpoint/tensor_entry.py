"""One tensor of a checkpoint: the rule by which ranks share it, or a list of its parts. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidewheel.checkpoint.sharding import Box, Cut, Sharding
from tidewheel.storage import Stamp

DTYPES: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1), "int64": ("I64", 8), "int32": ("I32", 4),
    "int16": ("I16", 2), "int8": ("I8", 1), "uint8": ("U8", 1), "uint16": ("U16", 2), "uint32": ("U32", 4),
    "uint64": ("U64", 8), "bool": ("BOOL", 1)}
"""By torch's name of a dtype: its name in the safetensors format, and the bytes of one element."""


@dataclass(frozen=True)
class RankFile(Stamp):
    """The file of one rank."""

    rank: int = 0
    head: int = 0
    """Bytes of its header, see `safetensors_head`. 0: unknown, and all its parts are listed."""


@dataclass(frozen=True)
class Chunk:
    """One box of a tensor and the position of its bytes, in row-major order."""

    file: int
    """Index into `CheckpointManifest.files`."""
    start: int
    """First byte in that file."""
    offsets: tuple[int, ...]
    """First index of the box in each dimension."""
    sizes: tuple[int, ...]
    """Shape of the box."""

    @property
    def box(self) -> Box:
        """The box."""
        return Box(self.offsets, self.sizes)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the state, whose parts follow from a rule or are listed."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...] = ()
    """The parts, where there is no rule."""
    shared: Sharding | None = None
    """The rule."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype][1]


def file_order(name: str, itemsize: int) -> tuple[int, str]:
    """Return the sort key of a tensor's part in a file: wide elements first, so that all are aligned, then the name.

    Args:
        name: path of the tensor.
        itemsize: bytes of an element.
    """
    return -itemsize, name


def own_parts(entries: Mapping[str, TensorEntry], rank: int) -> dict[str, Box]:
    """Return the parts that a rank writes, by path, in the order of its file."""
    parts = {}
    for path, entry in sorted(entries.items(), key=lambda item: file_order(item[0], item[1].itemsize)):
        box = None if entry.shared is None else entry.shared.on(rank)
        if box is not None:
            parts[path] = box
    return parts


def entry_json(tensor: TensorEntry) -> dict[str, Any]:
    """Return a tensor's entry in manifest.json."""
    head = {"dtype": tensor.dtype, "shape": tensor.shape}
    if tensor.shared is not None:
        return {**head, "cuts": cuts_json(tensor.shared), "first": tensor.shared.first}
    return {**head, "chunks": [[chunk.file, chunk.start, chunk.offsets, chunk.sizes] for chunk in tensor.chunks]}


def cuts_json(shared: Sharding) -> list[list[int]]:
    """Return the cuts of a rule as JSON values."""
    return [[cut.dimension, cut.pieces, cut.stride] for cut in shared.cuts]


def parse_entry(name: str, entry: dict[str, Any], files: Sequence[RankFile] = ()) -> TensorEntry:
    """Return a tensor's entry, having checked every field.

    Args:
        name: of the tensor.
        entry: as `entry_json` returns it.
        files: in which the listed parts are.

    Raises:
        ValueError: the entry is damaged. (Or TypeError or LookupError.)
    """
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name} has the unknown dtype {entry['dtype']!r}")
    shape = tuple(map(count, entry["shape"]))
    if "cuts" in entry:
        cuts = tuple(Cut(count(dimension), count(pieces), count(stride)) for dimension, pieces, stride in
                     entry["cuts"])
        shared = Sharding(shape, cuts, count(entry["first"]))
        return TensorEntry(entry["dtype"], shape, shared=shared)
    itemsize = DTYPES[entry["dtype"]][1]
    chunks = []
    for file, start, offsets, sizes in entry["chunks"]:
        chunk = Chunk(count(file), count(start), tuple(map(count, offsets)), tuple(map(count, sizes)))
        inside = len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
            offset + size <= whole for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape))
        if not inside or chunk.start + math.prod(chunk.sizes) * itemsize > files[chunk.file].bytes:
            raise ValueError(f"a part of {name} is outside the tensor or its file")
        chunks.append(chunk)
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"the parts of {name} do not add up to it")
    return TensorEntry(entry["dtype"], shape, tuple(chunks))


def count(value: Any) -> int:
    """Return a JSON value that is a count.

    Raises:
        ValueError: it is not.
    """
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is not a count")
    return value
