"""Run a function on several gloo ranks, each in its own process.

A fork server imports torch and the training loop once and starts the ranks, which saves seconds per rank.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

multiprocessing.set_forkserver_preload(["tests.preloaded"])


def on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> None:
    """Call `function(*arguments)`, a module-level function, on every rank and raise the first failure."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (world_size, f"file://{folder}/rendezvous", function, arguments), nprocs=world_size,
                           start_method="forkserver")


def _rank(rank: int, world_size: int, rendezvous: str, function: Callable[..., Any], arguments: tuple) -> None:
    import torch

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    try:
        function(*arguments)
    finally:
        dist.destroy_process_group()
