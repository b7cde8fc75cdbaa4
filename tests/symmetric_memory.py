"""Kernels of torch's symmetric-memory operators for a CPU, so that async tensor parallelism runs on gloo.

They are torch's own fallbacks: a collective, then the products. torch registers them for the meta device only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed._symmetric_memory as symmetric_memory


@contextmanager
def on_cpu() -> Iterator[None]:
    """Register the kernels for the block."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")
    try:
        yield
    finally:
        library._destroy()
