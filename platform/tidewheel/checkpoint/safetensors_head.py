"""The header of the safetensors files in which ranks write their parts of a checkpoint. Does not import torch.

https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence

from tidewheel.checkpoint.tensor_entry import DTYPES


def part_name(tensor: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """Return the name of a box of a tensor: the tensor's own name for the whole tensor, else "tensor@first,indices".

    Args:
        tensor: the tensor's name.
        shape: the tensor's shape.
        offsets: first index of the box in each dimension.
        sizes: shape of the box.
    """
    return tensor if tuple(sizes) == tuple(shape) else f"{tensor}@{','.join(map(str, offsets))}"


def safetensors_head(parts: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[bytes, list[int]]:
    """Return the header of a file, and the byte at which each part begins.

    Args:
        parts: (name, torch's name of the dtype, sizes) of each part, in the order of the file.

    Returns:
        the header (its length, JSON, and padding to 8 bytes), and the first byte of each part in the file.
    """
    entries: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    starts: list[int] = []
    start = 0
    for name, dtype, sizes in parts:
        code, itemsize = DTYPES[dtype]
        end = start + math.prod(sizes) * itemsize
        entries[name] = {"dtype": code, "shape": list(sizes), "data_offsets": [start, end]}
        starts.append(start)
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, [start + len(head) for start in starts]
