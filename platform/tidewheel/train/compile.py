"""torch.compile per block, with a cache on local disk that the next start finds warm.

One block is compiled, all others reuse it: they differ in weights only. The cache is a folder of this machine and
stays there: inductor's entries are pickles, and nothing that comes from storage is unpickled here.
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
    """Keep what inductor and triton compile in `folder`, and look there first; "": torch's own temporary folder.

    Call it before the first compiled forward pass.
    """
    if folder:
        place = Path(folder).expanduser().resolve()
        place.mkdir(parents=True, exist_ok=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place)
        os.environ["TRITON_CACHE_DIR"] = str(place / "triton")


def compile_blocks(blocks: Iterable[nn.Module], backend: str = "inductor") -> None:
    """Compile the forward pass of each block, in place: after activation checkpointing, before anything is sharded.

    Names of parameters stay as they are, and hooks (FSDP's) stay outside of the compiled code. Without gradients (in
    evaluations and text samples, whose shapes differ) blocks run as they were.
    """
    for block in blocks:
        compiled = torch.compile(block.forward, backend=backend)
        block.forward = partial(_forward, compiled, block.forward)  # type: ignore[method-assign]


def _forward(compiled: Callable[..., Any], plain: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return (compiled if torch.is_grad_enabled() else plain)(*arguments, **named)
