"""`manifest.json` of a checkpoint: its files, the position of each part of each tensor, and the run's own state.

A checkpoint exists when its manifest does. The manifest contains a hash of itself, so that damage to it is detected
like damage to the tensors. It is plain JSON, every field is checked, and reading it executes nothing.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from tidewheel.errors import CheckpointError, StorageError
from tidewheel.storage import Stamp, Store, content_hash, safe_key

KEY = "manifest.json"
FORMAT = 1
NAME = re.compile(r"step_(\d{8,18})(?:-g\d{1,18}(?:\.\d{1,4})?)?")
_HASH = re.compile(r"blake3-[0-9a-f]{64}")

DTYPES: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1), "int64": ("I64", 8), "int32": ("I32", 4),
    "int16": ("I16", 2), "int8": ("I8", 1), "uint8": ("U8", 1), "uint16": ("U16", 2), "uint32": ("U32", 4),
    "uint64": ("U64", 8), "bool": ("BOOL", 1)}
"""By torch's name of a dtype: its name in the safetensors format, and the bytes of one element."""


def step_name(step: int, writer: str = "") -> str:
    """Return the name of the checkpoint of `step`: "step_00000100".

    Args:
        step: number of completed steps.
        writer: distinguishes writers that save the same step: "g3" gives "step_00000100-g3".
    """
    return f"step_{step:08d}" + (f"-{writer}" if writer else "")


def step_of(name: str) -> int:
    """Return the step in the name of a checkpoint.

    Raises:
        ValueError: it is not the name of a checkpoint.
    """
    match = NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not the name of a checkpoint")
    return int(match[1])


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


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the state."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype][1]


@dataclass(frozen=True)
class CheckpointManifest:
    """What a checkpoint holds."""

    step: int
    world_size: int
    """Number of ranks that wrote it; any number can read it."""
    time: float
    """When it was committed, seconds since 1970."""
    files: tuple[Stamp, ...]
    """Their keys are names inside the checkpoint's folder."""
    tensors: dict[str, TensorEntry]
    """By path in the state, "model/embedding.weight"."""
    extra: dict[str, Any]
    """The run's own state, JSON values."""
    generation: int = 0
    """Number of the worker group that wrote it; `commit_log.epoch_of` gives the epoch."""

    @property
    def total_bytes(self) -> int:
        """Total bytes of all files."""
        return sum(file.bytes for file in self.files)

    @property
    def model_hash(self) -> str:
        """Return a hash of the model's tensors as they are stored, from the hashes of the files that hold them.

        A copy has the same hash. The same values saved by another number of ranks have another one.
        """
        stored = {name: [tensor.dtype, tensor.shape, [[self.files[chunk.file].hash, chunk.start, chunk.offsets]
                                                      for chunk in tensor.chunks]]
                  for name, tensor in self.tensors.items() if name.startswith("model/")}
        return _self_hash(stored)

    def to_json(self) -> bytes:
        """Return the bytes of manifest.json, including the hash of itself."""
        values = {
            "format": FORMAT, "step": self.step, "world_size": self.world_size, "time": self.time,
            "files": [{"key": file.key, "bytes": file.bytes, "hash": file.hash} for file in self.files],
            "tensors": {name: {"dtype": tensor.dtype, "shape": tensor.shape, "chunks": [
                [chunk.file, chunk.start, chunk.offsets, chunk.sizes] for chunk in tensor.chunks]}
                for name, tensor in self.tensors.items()},
            "extra": self.extra, "generation": self.generation}
        return (json.dumps({**values, "manifest_hash": _self_hash(values)}, sort_keys=True) + "\n").encode()


def _self_hash(values: dict[str, Any]) -> str:
    return content_hash(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def read_manifest(store: Store, name: str) -> CheckpointManifest:
    """Return the manifest of checkpoint `name`, having checked every field.

    Raises:
        CheckpointError: there is none (the checkpoint was never committed), or it is damaged.
    """
    key = f"{name}/{KEY}"
    try:
        return parse_manifest(store.read(key), name, store.at(key))
    except FileNotFoundError:
        raise CheckpointError("not committed: there is no manifest.json", where=store.at(name),
                              fix="nothing to do: training uses the newest committed one") from None


def parse_manifest(data: bytes, name: str, where: str) -> CheckpointManifest:
    """Return the manifest in `data`, having checked every field.

    Args:
        data: content of manifest.json.
        name: the checkpoint.
        where: location for error messages.

    Raises:
        CheckpointError: the manifest is damaged.
    """
    try:
        values = json.loads(data)
        if not isinstance(values, dict) or values.pop("manifest_hash", None) != _self_hash(values):
            raise ValueError("its content does not match its own hash")
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']!r} is not the known one, {FORMAT}")
        manifest = _build(values)
        if step_of(name) != manifest.step:
            raise ValueError(f"it is that of step {manifest.step}")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, StorageError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error).splitlines()[0]
        raise CheckpointError(f"manifest.json is damaged: {reason}", where=where,
                              fix="training skips it; delete this checkpoint's folder") from None
    return manifest


def _build(values: dict[str, Any]) -> CheckpointManifest:
    files = []
    for file in values["files"]:
        if "/" in safe_key(file["key"]) or not _HASH.fullmatch(file["hash"]):
            raise ValueError(f"the file {file['key']!r} is outside its folder or has no hash")
        files.append(Stamp(file["key"], _count(file["bytes"]), file["hash"]))
    tensors = {name: _tensor(name, entry, files) for name, entry in values["tensors"].items()}
    if not isinstance(values["extra"], dict):
        raise ValueError("extra is not a JSON object")
    return CheckpointManifest(step=_count(values["step"]), world_size=_count(values["world_size"]),
                              time=float(values["time"]), files=tuple(files), tensors=tensors, extra=values["extra"],
                              generation=_count(values.get("generation", 0)))


def _tensor(name: str, entry: dict[str, Any], files: list[Stamp]) -> TensorEntry:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name} has the unknown dtype {entry['dtype']!r}")
    shape = tuple(map(_count, entry["shape"]))
    itemsize = DTYPES[entry["dtype"]][1]
    chunks = []
    for file, start, offsets, sizes in entry["chunks"]:
        chunk = Chunk(_count(file), _count(start), tuple(map(_count, offsets)), tuple(map(_count, sizes)))
        inside = len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
            offset + size <= whole for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape))
        if not inside or chunk.start + math.prod(chunk.sizes) * itemsize > files[chunk.file].bytes:
            raise ValueError(f"a part of {name} is outside the tensor or its file")
        chunks.append(chunk)
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"the parts of {name} do not add up to it")
    return TensorEntry(entry["dtype"], shape, tuple(chunks))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is not a count")
    return value
