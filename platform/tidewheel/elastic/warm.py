"""Prepare a process to take a rank at once: do what is slow the first time before other ranks wait for it."""

from __future__ import annotations

import gc
import importlib
import logging
import threading
from typing import Any

logger = logging.getLogger(__name__)
MODULES = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor", "tidewheel.checkpoint.tiers",
           "tidewheel.train.loop", "tidewheel.inference.answers", "tidewheel.inference.during_training",
           "tidewheel.inference.sample", "tidewheel.outer.exchange", "tidewheel.elastic.process_group")
"""What every worker imports before its first step."""

_done: list[bool] = []
_imports: list[threading.Thread] = []


def begin_imports() -> None:
    """Import what training needs in a thread, while this process waits for the others of its group."""
    thread = threading.Thread(target=_import_all, name="imports", daemon=True)
    _imports.append(thread)
    thread.start()


def wait_for_imports() -> None:
    """Wait for `begin_imports`. Two threads that import modules with cycles could see each other's unfinished ones."""
    for thread in _imports:
        thread.join()


def _import_all() -> None:
    gc.disable()  # modules stay: to look through them again and again would be a sixth of the time
    try:
        for name in MODULES:
            importlib.import_module(name)
    except Exception as error:  # the training thread imports it again, and reports the error
        logger.warning("%s cannot be imported: %s", name, error)
    finally:
        gc.enable()


def warm_up(config: Any, *, deeply: bool) -> None:
    """Import everything that a generation needs.

    Args:
        config: the run's configuration.
        deeply: also do two steps of a tiny sharded model, which takes up to a second. The first generation of a run
            does not need it: all its ranks are slow together.
    """
    import torch
    import torch.distributed.fsdp
    import torch.distributed.tensor

    import tidewheel.checkpoint.tiers
    import tidewheel.train.loop  # noqa: F401

    if deeply and not _done:
        _done.append(True)
        torch.set_num_threads(max(1, int(config.elastic.cpus_per_worker)))
        _steps()
    gc.collect()
    gc.freeze()  # modules stay: let later collections skip them


def _steps() -> None:
    """Do two optimizer steps of a sharded model in a group of this process alone."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if dist.is_initialized():
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(2):
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
