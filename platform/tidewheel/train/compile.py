"""torch.compile per block, with a cache on local disk that makes the next start warm.

torch compiles one block and reuses the code for all others, which differ in weights only. The cache stays in a folder
of this machine: inductor's entries are pickles, and Tidewheel unpickles nothing that comes from storage.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn


def use_cache(folder: str) -> None:
    """Set the cache folder of inductor and triton; "": torch's own temporary folder.

    Call it before the first compiled forward pass.
    """
    if folder:
        path = Path(folder).expanduser().resolve()
        path.mkdir(parents=True, exist_ok=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(path)
        os.environ["TRITON_CACHE_DIR"] = str(path / "triton")


def compile_blocks(blocks: Iterable[nn.Module], backend: str = "inductor") -> None:
    """Compile the forward pass of each block in place, after activation checkpointing and before sharding.

    Parameter names do not change, and hooks (FSDP's) stay outside the compiled code. Without gradients (in evaluations
    and text samples, whose shapes differ) blocks run uncompiled.

    Args:
        blocks: the decoder's blocks.
        backend: backend of torch.compile.
    """
    for block in blocks:
        compiled = torch.compile(block.forward, backend=backend)
        block.forward = partial(_forward, compiled, block.forward)  # type: ignore[method-assign]


def _forward(compiled: Callable[..., Any], plain: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return (compiled if torch.is_grad_enabled() else plain)(*arguments, **named)
