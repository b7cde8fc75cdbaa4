"""The head of the files in which ranks write their parts of a checkpoint; needs no torch.

https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence

from tidewheel.checkpoint.manifest import DTYPES


def part_name(tensor: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """Name of a box of `sizes` at `offsets` of a tensor: the tensor's own when it is all of it, else
    "tensor@first,indices"."""
    return tensor if tuple(sizes) == tuple(shape) else f"{tensor}@{','.join(map(str, offsets))}"


def safetensors_head(parts: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[bytes, list[int]]:
    """The head of a file with these parts one behind the other, each (name, torch's name of its dtype, sizes).

    Returns:
        length, JSON and padding to 8 bytes; and where each part begins in the file.
    """
    described: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    starts, at = [], 0
    for name, dtype, sizes in parts:
        code, itemsize = DTYPES[dtype]
        end = at + math.prod(sizes) * itemsize
        described[name] = {"dtype": code, "shape": list(sizes), "data_offsets": [at, end]}
        starts.append(at)
        at = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, [start + len(head) for start in starts]
