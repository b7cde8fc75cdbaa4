"""A small self-test: can this process compute, and reach what the run needs? A worker of a place that was blamed for a
failure does it before it gets a rank again."""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidewheel import storage

if TYPE_CHECKING:
    from tidewheel.train.config import TrainConfig

SIZE = 512
"""Rows of the matrices: their products are whole numbers, exact in every precision that multiplies matrices."""
FILL = 0.5
ELEMENTS = 1 << 24
"""Numbers that are allocated, written and read back: 64 MiB."""
DISK_BYTES = 1 << 20


class ProbeError(RuntimeError):
    """The self-test failed; says in what."""


def probe(config: TrainConfig, device: Any) -> None:
    """Raise what is wrong with this process, its device, its disk or its way to storage; return if nothing is.

    Raises:
        ProbeError: a result is wrong.
        Exception: whatever the device, the disk or the store raises.
    """
    computes(device)
    folder = Path(config.data.cache or tempfile.gettempdir())
    folder.mkdir(parents=True, exist_ok=True)
    _writes(folder)
    for uri in (config.run_uri, config.data.uri):
        if uri:
            storage.store(uri).exists("manifest.json")  # what is asked for does not matter, that it is answered does


def computes(device: Any) -> None:
    """Allocate on `device`, multiply two matrices there, and compare with the known result.

    Raises:
        ProbeError: a number is not what it must be.
    """
    import torch

    memory = torch.full((ELEMENTS,), FILL, device=device)
    total = float(memory.sum(dtype=torch.float64))
    if total != FILL * ELEMENTS:
        raise ProbeError(f"{ELEMENTS} numbers of {FILL} add up to {total} on {device}")
    rows = torch.arange(SIZE).reshape(-1, 1)
    columns = torch.arange(SIZE).reshape(1, -1)
    left, right = (rows + 2 * columns) % 7, (3 * rows + columns) % 5
    found = left.to(device, torch.float32) @ right.to(device, torch.float32)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    wrong = int((found.cpu().long() != left @ right).sum())
    if wrong:
        raise ProbeError(f"{wrong} of {SIZE * SIZE} entries of a matrix product are wrong on {device}")


def _writes(folder: Path) -> None:
    """Write a file and read it back."""
    file, content = folder / f".probe-{uuid.uuid4().hex}", uuid.uuid4().bytes * (DISK_BYTES // 16)
    try:
        file.write_bytes(content)
        if file.read_bytes() != content:
            raise ProbeError(f"a file in {folder} does not hold what was written to it")
    finally:
        file.unlink(missing_ok=True)
