"""Small collectives outside FSDP. All of them also work without torch.distributed, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from tidewheel.train.host_copy import HostCopy
from tidewheel.train.runtime import AbortedError, Runtime

T = TypeVar("T")
Later: TypeAlias = Callable[[], T]
"""Waits for a value and returns it."""


class Collectives:
    """Small collectives over the ranks of a run, in rank order.

    Raises:
        RuntimeError: the world size is above 1 and torch.distributed is not initialised.
        AbortedError: a method that returns values to the host was called, and the process group was broken off.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.rank, self.world_size = runtime.rank, runtime.world_size
        self.device = torch.device(runtime.device)
        self._group = runtime.group
        if self.world_size > 1 and not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(f"world size {self.world_size} without torch.distributed: initialise it first")

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise sum over ranks of a fp64 tensor, on every rank; in place if it is on the device."""
        total = self.to_device(values)
        if self.world_size > 1:
            dist.all_reduce(total)
        return total

    def check_whole(self) -> None:
        """Raise unless the values that were just read back from the device are the collectives' results.

        Call it after every read and before the values are used, on every rank. A collective that NCCL aborts raises no
        error; see `Group.is_whole`.

        Raises:
            AbortedError: the process group was broken off.
        """
        if not self._group.is_whole():
            raise AbortedError("the process group was broken off, so the results of its collectives do not count")

    def to_host(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor in host memory.

        Raises:
            AbortedError: the process group was broken off, so the values mean nothing.
        """
        return self.to_host_later(values)()

    def to_host_later(self, values: torch.Tensor) -> Later[torch.Tensor]:
        """Start to copy a tensor to host memory, and return a function that waits for it; see `to_host`."""
        copy = HostCopy(values)

        def read() -> torch.Tensor:
            host = copy.wait()
            self.check_whole()
            return host

        return read

    def to_device(self, values: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor on the training device; the host does not wait for the copy."""
        if self.device.type != "cpu" and values.device.type == "cpu":
            return values.pin_memory().to(self.device, non_blocking=True)
        return values.to(self.device)

    def gather(self, values: torch.Tensor, group: Any = None) -> torch.Tensor | None:
        """Concatenate the ranks' vectors on the first rank of a group.

        Args:
            values: int64 vector, of the same length on all ranks.
            group: process group; None for this rank alone.

        Returns:
            The vectors in rank order on the group's first rank, None on the others.
        """
        return self.gather_later(values, group)()

    def gather_later(self, values: torch.Tensor, group: Any = None) -> Later[torch.Tensor | None]:
        """Start `gather`, and return a function that waits for its result.

        Args:
            values: int64 vector, of the same length on all ranks.
            group: process group; None for this rank alone.
        """
        if group is None:
            return self.to_host_later(values)
        own_values = self.to_device(values.to(torch.int64))
        is_first = dist.get_rank(group) == 0
        parts = [torch.empty_like(own_values) for _ in range(dist.get_world_size(group))] if is_first else None
        dist.gather(own_values, parts, group=group, group_dst=0)
        return self.to_host_later(torch.cat(parts)) if parts is not None else lambda: None

    def gather_all(self, values: torch.Tensor) -> torch.Tensor | None:
        """Concatenate the vectors of all ranks on rank 0; see `gather`."""
        return self.gather(values, dist.group.WORLD if self.world_size > 1 else None)

    def from_first(self, value: int) -> int:
        """Return rank 0's `value` on every rank."""
        if self.world_size == 1:
            return value
        box = torch.tensor([value], device=self.device, dtype=torch.int64)
        dist.broadcast(box, src=0)
        return int(self.to_host(box))

    def bytes_from_first(self, data: bytes) -> bytes:
        """Return rank 0's `data` on every rank."""
        size = self.from_first(len(data))
        if self.world_size == 1 or not size:
            return data[:size]
        box = torch.zeros(size, dtype=torch.uint8)
        if self.rank == 0:
            box = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        box = box.to(self.device)
        dist.broadcast(box, src=0)
        return self.to_host(box).numpy().tobytes()
