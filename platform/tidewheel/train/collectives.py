"""The few things ranks tell each other outside FSDP. All of them work without torch.distributed too."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tidewheel.train.runtime import Runtime


class Collectives:
    """Small collectives over the ranks of a run, in rank order."""

    def __init__(self, runtime: Runtime) -> None:
        self.rank, self.world_size = runtime.rank, runtime.world_size
        self.group: Any = runtime.process_group
        self.device = torch.device(runtime.device)
        if self.world_size > 1 and not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(f"world size {self.world_size} without torch.distributed: initialise it first")

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over ranks of a fp64 vector, the same on every rank."""
        total = values.to(self.device, torch.float64)
        if self.world_size > 1:
            dist.all_reduce(total, group=self.group)
        return total.cpu()

    def gather(self, values: torch.Tensor) -> torch.Tensor | None:
        """Rank 0: the int64 vectors of all ranks (of equal length) one after the other; others: None."""
        if self.world_size == 1:
            return values.cpu()
        mine = values.to(self.device, torch.int64)
        parts = [torch.empty_like(mine) for _ in range(self.world_size)] if self.rank == 0 else None
        dist.gather(mine, parts, group=self.group, group_dst=0)
        return torch.cat(parts).cpu() if parts is not None else None

    def from_first(self, value: int) -> int:
        """Rank 0's `value`, on every rank."""
        if self.world_size == 1:
            return value
        box = torch.tensor([value], device=self.device, dtype=torch.int64)
        dist.broadcast(box, group=self.group, group_src=0)
        return int(box.item())
