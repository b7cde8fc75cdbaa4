"""Deterministic kernels."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.deterministic


@contextlib.contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Use deterministic kernels inside the block. Enter it before CUDA is first used.

    Many GPU kernels add with atomics, for example the backward pass of flash attention or of an embedding. With them
    two runs differ. cuBLAS also needs a fixed workspace (https://docs.nvidia.com/cuda/cublas/#results-reproducibility),
    and autotuning must not select another convolution. Torch raises RuntimeError for an operation without a
    deterministic kernel.
    """
    memory: Any = torch.utils.deterministic
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
              memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # it would write to every new tensor
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark = before[2:]
