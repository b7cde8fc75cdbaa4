"""A short self-test of a process: does it compute correctly, and can it reach the disk and storage of the run?

A worker of a place that was blamed for a failure must pass it before it gets a rank again.
"""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidewheel import storage

if TYPE_CHECKING:
    from tidewheel.train.config import TrainConfig

SIZE = 512
"""Rows and columns of the matrices. Their product holds integers that every precision represents exactly."""
FILL = 0.5
ELEMENTS = 1 << 24
"""float32 numbers that are allocated, written and read back: 64 MiB."""
DISK_BYTES = 1 << 20


class ProbeError(RuntimeError):
    """The self-test failed."""


def probe(config: TrainConfig, device: Any) -> None:
    """Return if this process, its device, its disk and its connection to storage work.

    Raises:
        ProbeError: a result is wrong.
        Exception: any error of the device, the disk or the store.
    """
    check_arithmetic(device)
    folder = Path(config.data.cache or tempfile.gettempdir())
    folder.mkdir(parents=True, exist_ok=True)
    _check_disk(folder)
    for uri in (config.run_uri, config.data.uri):
        if uri:
            storage.store(uri).exists("manifest.json")  # any answer will do


def check_arithmetic(device: Any) -> None:
    """Allocate memory on `device`, multiply two matrices there, and compare with the known result.

    Raises:
        ProbeError: a number is wrong.
    """
    import torch

    memory = torch.full((ELEMENTS,), FILL, device=device)
    total = float(memory.sum(dtype=torch.float64))
    if total != FILL * ELEMENTS:
        raise ProbeError(f"{ELEMENTS} numbers of {FILL} add up to {total} on {device}")
    rows = torch.arange(SIZE).reshape(-1, 1)
    columns = torch.arange(SIZE).reshape(1, -1)
    left, right = (rows + 2 * columns) % 7, (3 * rows + columns) % 5
    product = left.to(device, torch.float32) @ right.to(device, torch.float32)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    wrong = int((product.cpu().long() != left @ right).sum())
    if wrong:
        raise ProbeError(f"{wrong} of {SIZE * SIZE} entries of a matrix product are wrong on {device}")


def _check_disk(folder: Path) -> None:
    """Write a file and read it back."""
    file = folder / f".probe-{uuid.uuid4().hex}"
    content = uuid.uuid4().bytes * (DISK_BYTES // 16)
    try:
        file.write_bytes(content)
        if file.read_bytes() != content:
            raise ProbeError(f"a file in {folder} does not hold what was written to it")
    finally:
        file.unlink(missing_ok=True)
