"""One worker's part of a snapshot in a file of the local disk: a slot with another header.

The file is a safetensors file of two tensors: `part`, the bytes of the slot behind its header, and `hashes`, those of
its blocks. Its header is as long as a slot's, so every byte is where it is in the slot, and a reader maps it alike. The
header's metadata describes the part and has a hash of itself. Does not import torch.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tidewheel.checkpoint.memory_tier.part_store import Part
from tidewheel.checkpoint.memory_tier.slots import BLOCK_BYTES, HEADER_BYTES, Content, Slot, block_range, num_blocks
from tidewheel.checkpoint.memory_tier.table import tensors_start

FORMAT = "tidewheel part 1"


class SlotChanged(Exception):
    """The slot got other content while it was being written."""


class DiskSlot(Slot):
    """A part's file, mapped for reading when it is first read.

    Args:
        path: an existing file.
        content: what it holds.
    """

    def __init__(self, path: Path, content: Content) -> None:
        self.path, self.capacity = path, content.end
        self._content = content
        self._bytes: memoryview | None = None

    @property
    def bytes(self) -> memoryview:  # type: ignore[override]
        """The file, with every byte where it is in a slot."""
        if self._bytes is None:
            file = _open(self.path)
            try:
                self._bytes = memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_READ))
            finally:
                os.close(file)
        return self._bytes

    def content(self) -> Content | None:
        """Return what the file holds."""
        return self._content


def write(path: Path, part: Part) -> int:
    """Write a part to a new file, and return its length once it is on the disk.

    Args:
        path: of the file, which must not exist.
        part: the part; its slot may get other content meanwhile.

    Raises:
        SlotChanged: it did.
        OSError: the disk fails or is full.
    """
    content = part.content
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with open(file, "wb", buffering=0) as sink:
        _write_all(sink, _head(part))
        for index in range(num_blocks(content.end)):
            start, stop = block_range(index, index, content.end)
            block = bytes(part.slot.bytes[start:stop])
            if xxhash.xxh3_64_intdigest(block) != int(part.hashes[index]):
                raise SlotChanged(f"the slot of step {content.step} was used again")
            _write_all(sink, block)
        if not part.intact:
            raise SlotChanged(f"the slot of step {content.step} was used again")
        _write_all(sink, part.hashes.tobytes())
        os.fsync(file)
        length = os.fstat(file).st_size
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # nobody reads it soon
    return length


def read(path: Path) -> Part:
    """Return the part in a file, without reading its tensors.

    Its number is 0.

    Raises:
        ValueError: the file is damaged, or no such file.
        OSError: it cannot be read.
    """
    file = _open(path)
    with open(file, "rb") as source:
        head = source.read(HEADER_BYTES)
        try:
            content, table_hash, extra_hash = _parse(head)
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"its header is damaged: {error}") from None
        expected = content.end + 8 * num_blocks(content.end)
        if (length := os.fstat(source.fileno()).st_size) != expected:
            raise ValueError(f"{length} bytes, expected {expected}")
        source.seek(content.end)
        hashes = np.frombuffer(source.read(), np.uint64)
    return Part(0, content, "disk", DiskSlot(path, content), hashes, table_hash, extra_hash)


def _head(part: Part) -> bytes:
    content = part.content
    described = {"format": FORMAT, "content": json.dumps(asdict(content)), "table_hash": str(part.table_hash),
                 "extra_hash": str(part.extra_hash), "block_bytes": str(BLOCK_BYTES)}
    length = content.end - HEADER_BYTES
    blocks = num_blocks(content.end)
    text = json.dumps({
        "__metadata__": {**described, "hash": _hash(described)},
        "part": {"dtype": "U8", "shape": [length], "data_offsets": [0, length]},
        "hashes": {"dtype": "U64", "shape": [blocks], "data_offsets": [length, length + 8 * blocks]}}).encode()
    assert len(text) <= HEADER_BYTES - 8  # a few numbers
    return (HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(HEADER_BYTES - 8)


def _parse(head: bytes) -> tuple[Content, int, int]:
    """Return what a header describes, and the hashes of the table and of `extra`."""
    if len(head) < HEADER_BYTES or int.from_bytes(head[:8], "little") != HEADER_BYTES - 8:
        raise ValueError("its length is wrong")
    described = json.loads(head[8:])["__metadata__"]
    if described.pop("hash") != _hash(described) or described["format"] != FORMAT:
        raise ValueError("its hash differs")
    if int(described["block_bytes"]) != BLOCK_BYTES:
        raise ValueError("its blocks have another length")
    content = Content(**json.loads(described["content"]))
    if not tensors_start(content.table_bytes) <= content.extra_start <= content.end:
        raise ValueError("its lengths are impossible")
    return content, int(described["table_hash"]), int(described["extra_hash"])


def _hash(described: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(described, sort_keys=True).encode())


def _open(path: Path) -> int:
    """Return a descriptor of a regular file of this user that is no link.

    Raises:
        OSError: it is not.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        os.close(file)
        raise PermissionError(f"{path} is not a file of this user")
    return file


def _write_all(sink: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[sink.write(view):]
