"""A short self-test of a process: does it compute correctly, and can it reach the disk and storage of the run?

Each worker passes the part of its node before it takes part (`at_start`). A worker of a place that was blamed for a
failure must pass all of it before it gets a rank again.
"""

from __future__ import annotations

import hashlib
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
PRODUCT_HASH = "e8c1278a3d0695d2e67b21d7a281d6f7ce50076e353182fdf4211e831d5f1a8b"
"""SHA-256 of the product's entries as little-endian int32, computed once with Python's integers."""


class ProbeError(RuntimeError):
    """The self-test failed."""


def probe(config: TrainConfig, device: Any) -> None:
    """Return if this process, its device, its disk and its connection to storage work.

    Raises:
        ProbeError: a result is wrong.
        Exception: any error of the device, the disk or the store.
    """
    check_node(config, device)
    for uri in (config.run_uri, config.data.uri):
        if uri:
            storage.store(uri).exists("manifest.json")  # any answer will do


def at_start(config: TrainConfig, device: Any) -> None:
    """Return if this process's node works. Storage is left out: if it is away, it is so for all nodes.

    Raises:
        ProbeError: a result is wrong.
        Exception: any error of the device or the disk.
    """
    folder = Path(config.data.cache or tempfile.gettempdir())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (NotADirectoryError, FileExistsError, PermissionError):  # a wrong setting, which the run reports itself
        check_arithmetic(device)
        check_gpu(device)
        return
    check_node(config, device)


def check_node(config: TrainConfig, device: Any) -> None:
    """Check the device and the disk of this process.

    Raises:
        ProbeError: a result is wrong.
        Exception: any error of the device or the disk.
    """
    check_arithmetic(device)
    check_gpu(device)
    folder = Path(config.data.cache or tempfile.gettempdir())
    folder.mkdir(parents=True, exist_ok=True)
    _check_disk(folder)


def check_gpu(device: Any) -> None:
    """Ask the driver about the device; nothing is known on CPU.

    Raises:
        ProbeError: the driver reports a fault.
    """
    from tidewheel.elastic.gpu_probe import gpu_problems

    problems = gpu_problems(device)
    if problems:
        raise ProbeError(f"{device}: {'; '.join(problems)}")


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
    result = product.cpu()
    if hashlib.sha256(result.to(torch.int32).numpy().astype("<i4").tobytes()).hexdigest() == PRODUCT_HASH:
        return
    wrong = int((result.long() != left @ right).sum())  # by this node's own integers, which may be wrong as well
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
