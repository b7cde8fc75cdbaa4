"""Kernels that give the same bits every time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.deterministic


@contextlib.contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Let torch choose deterministic kernels, or raise RuntimeError where it has none; before CUDA is first used.

    With one of many kernels that add with atomics, such as the backward pass of flash attention or of an embedding, a
    run on GPUs would differ from itself. cuBLAS needs a fixed workspace for it
    (https://docs.nvidia.com/cuda/cublas/#results-reproducibility), and autotuning must not pick another convolution.
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
