"""A default process group that lasts as long as the process: torch 2.14 and later reconnect it in each generation.

`torch.distributed._reconfigure` gives a group new peers. The group is made once per process, and a generation only
connects it. Each rank puts the group's handle into the generation's store; the order of the handles gives the ranks
(https://docs.pytorch.org/docs/2.14/distributed.html). Torch marks it as experimental. Groups made from the default
group are destroyed with their generation as before, because their members change.

gloo and nccl2 can do it. torch 2.11 to 2.13, and the backend nccl, make a new default group for each generation.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

logger = logging.getLogger(__name__)
BACKENDS = frozenset({"gloo", "nccl2"})
"""Backends of torch that implement it."""
CONNECT_SECONDS = 30.0
"""Time limit for connecting once all ranks are there."""
PREFIX = "reconfigure"
"""Keys of torch's own, in the store that all generations of a process share."""

_store_address: tuple[str, int] | None = None
"""Where the present default group meets its peers; None: this process has no such group."""


def is_supported(backend: str) -> bool:
    """Return whether torch can give a group of this backend new peers."""
    return (hasattr(dist, "_reconfigure") and backend in BACKENDS
            and "enable_reconfigure" in inspect.signature(dist.init_process_group).parameters)


def connect(backend: str, address: tuple[str, int], store: dist.Store, generation: int, rank: int, world_size: int, *,
            seconds: float, recorded: Callable[[], AbstractContextManager[None]]) -> None:
    """Connect the default group to the ranks of a generation; make it first if this process has none.

    Args:
        backend: of the group, see `is_supported`.
        address: host and port of the store of all generations.
        store: the generation's own part of it. The ranks wait for each other here.
        generation: number of the generation, which no other has.
        rank: rank of this process.
        world_size: number of ranks.
        seconds: time limit of collectives.
        recorded: context in which connections are the generation's, and may be broken off.

    Raises:
        RuntimeError: the ranks cannot connect. The group cannot be used any more: call `discard`.
    """
    global _store_address
    torch_dist: Any = dist  # torch 2.13, which mypy reads, has none of these functions
    if _store_address != address:
        discard()
        # outside `recorded`: torch uses this connection in later generations too
        client = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=seconds))
        torch_dist.init_process_group(backend, store=dist.PrefixStore(PREFIX, client), rank=rank,
                                      world_size=world_size, timeout=timedelta(seconds=seconds),
                                      enable_reconfigure=True)
        _store_address = address
    with recorded():
        store.set(f"handle/{rank}", torch_dist._get_reconfigure_handle())
        handles = [store.get(f"handle/{peer}").decode() for peer in range(world_size)]
        torch_dist._reconfigure(uuid=generation, handles=handles, timeout=timedelta(seconds=CONNECT_SECONDS)).wait()
    _follow(store, world_size)
    set_timeout = getattr(dist, "set_timeout", distributed_c10d._set_pg_timeout)  # its name before 2.14
    set_timeout(timedelta(seconds=seconds), distributed_c10d._get_default_group())


def _follow(store: dist.Store, world_size: int) -> None:
    """Bring torch's records of the default group up to date, which groups are made from.

    `_reconfigure` changes the group alone. New groups take their ranks, their names (by a count) and their store from
    these records, which must be equal on survivors and new processes.
    """
    world: Any = distributed_c10d._world
    group = distributed_c10d._get_default_group()
    world.pg_map[group] = (world.pg_map[group][0], store)
    world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    world.group_count = 1  # as after `init_process_group`


def is_default() -> bool:
    """Return whether the default group of this process is one that lasts."""
    return _store_address is not None and dist.is_initialized()


def release() -> None:
    """Destroy the groups that were made from the default group."""
    world: Any = distributed_c10d._world
    default = distributed_c10d._get_default_group()
    for group in [group for group in world.pg_map if group is not default]:
        dist.destroy_process_group(group)


def discard() -> None:
    """Destroy the default group too: the process needs none, or a new one."""
    global _store_address
    if is_default():
        dist.destroy_process_group()
    _store_address = None
