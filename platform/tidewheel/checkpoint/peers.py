"""The ranks that save and load together, on a gloo group of their own: apart from the training's collectives."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

PATIENCE_SECONDS = 1800.0
"""How long a rank waits for another's part of a load."""
MARGIN_SECONDS = 300.0
"""Longer than another's save may take: the other begins later."""


class Peers:
    """All ranks of `process_group` (default: torch.distributed's own), or one process alone.

    To be made by all ranks together, on the training thread.

    Args:
        save_seconds: time limit of a save.
    """

    def __init__(self, process_group: Any = None, save_seconds: float = 0.0) -> None:
        self.group: Any = None
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
            self.rank, self.size = dist.get_rank(process_group), len(ranks)
            if self.size > 1:
                patience = timedelta(seconds=max(PATIENCE_SECONDS, save_seconds + MARGIN_SECONDS))
                self.group = dist.new_group(ranks, timeout=patience, backend="gloo",
                                            use_local_synchronization=process_group is not None)

    @property
    def alone(self) -> bool:
        """There is no other rank: no collective is needed."""
        return self.group is None

    def from_first(self, produce: Callable[[], T]) -> T:
        """What `produce` returns on rank 0, on all ranks; what it raises there is raised on all."""
        if self.group is None:
            return produce()
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = produce()
            except Exception as error:  # the others wait for it
                answer[1] = error
        dist.broadcast_object_list(answer, group=self.group, group_src=0)
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    def all(self, value: T) -> list[T]:
        """The value of every rank, on all ranks."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values
