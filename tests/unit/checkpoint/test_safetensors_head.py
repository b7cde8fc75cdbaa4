"""Tests of the header of a checkpoint's files, read by the safetensors package."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tidewheel.checkpoint.safetensors_head import part_name, safetensors_head
from tidewheel.checkpoint.tensor_entry import DTYPES

PARTS = [("a", "float32", (2, 3)), ("b@4,0", "bfloat16", (1, 5)), ("scalar", "int64", ()), ("none", "uint8", (0, 2)),
         ("ü", "float16", (7,))]


@pytest.mark.parametrize("letters", range(1, 9))
def test_safetensors_reads_what_the_header_describes(tmp_path: Path, letters: int):
    """With headers of each length modulo 8."""
    parts = [("a" * letters, "float32", (2, 3)), *PARTS[1:]]
    head, starts = safetensors_head(parts)
    lengths = [math.prod(sizes) * DTYPES[dtype][1] for _, dtype, sizes in parts]
    content = bytes(number % 251 for number in range(sum(lengths)))
    (tmp_path / "file.safetensors").write_bytes(head + content)
    with safe_open(tmp_path / "file.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert sorted(file.keys()) == sorted(name for name, _, _ in parts)
        for (name, dtype, sizes), start, length in zip(parts, starts, lengths, strict=True):
            tensor = file.get_tensor(name)
            assert tuple(tensor.shape) == sizes
            assert str(tensor.dtype) == f"torch.{dtype}"
            raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            assert raw.tobytes() == (head + content)[start:start + length]
    assert len(head) % 8 == 0
    assert np.all(np.diff(starts) >= 0)


@pytest.mark.parametrize(("shape", "offsets", "sizes", "name"), [
    ((4, 6), (0, 0), (4, 6), "w"), ((4, 6), (2, 0), (2, 6), "w@2,0"), ((), (), (), "w"), ([4], [0], (4,), "w"),
    ((4,), (0,), (2,), "w@0")])
def test_only_a_part_of_a_tensor_has_its_position_in_its_name(shape, offsets, sizes, name: str):
    assert part_name("w", shape, offsets, sizes) == name
