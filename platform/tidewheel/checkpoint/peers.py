"""The ranks that save and load together, on a gloo group of their own, apart from the training's collectives."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class RankError(Exception):
    """What went wrong on one rank, raised on all ranks; its cause is the error.

    Args:
        rank: the lowest rank that failed.
        error: its error.
    """

    def __init__(self, rank: int, error: Exception) -> None:
        super().__init__(rank, error)
        self.rank, self.error = rank, error

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.error}"


LOAD_SECONDS = 1800.0
"""Longest time that a rank waits for another's part of a load."""
MARGIN_SECONDS = 300.0
"""Added to the time limit of a save, because another rank may begin it later."""


class Peers:
    """All ranks of a process group, or a single process. All ranks construct it together, on the training thread.

    Args:
        process_group: the ranks; default: torch.distributed's default group, or this process alone.
        save_seconds: time limit of a save.
    """

    def __init__(self, process_group: Any = None, save_seconds: float = 0.0) -> None:
        self.group: Any = None
        self.rank, self.size, self.ranks = 0, 1, [0]
        if dist.is_available() and dist.is_initialized():
            ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
            self.rank, self.size, self.ranks = dist.get_rank(process_group), len(ranks), ranks
            if self.size > 1:
                timeout = timedelta(seconds=max(LOAD_SECONDS, save_seconds + MARGIN_SECONDS))
                self.group = dist.new_group(ranks, timeout=timeout, backend="gloo",
                                            use_local_synchronization=process_group is not None)

    @property
    def alone(self) -> bool:
        """Whether this is the only rank, so that no collective is needed."""
        return self.group is None

    def from_first(self, produce: Callable[[], T]) -> T:
        """Call `produce` on rank 0 and return its result on all ranks; if it raises, raise on all ranks."""
        if self.group is None:
            return produce()
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = produce()
            except Exception as error:  # the other ranks wait for it
                answer[1] = error
        dist.broadcast_object_list(answer, group=self.group, group_src=0)
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    def from_rank(self, rank: int, value: T) -> T:
        """Return `value` of one rank on all ranks.

        Args:
            rank: the rank, from 0 among the peers.
            value: this rank's.
        """
        if self.group is None:
            return value
        answer = [value]
        dist.broadcast_object_list(answer, group=self.group, group_src=rank)
        return answer[0]

    def to_first(self, value: T | Exception) -> list[T]:
        """Return the value of every rank, by rank, on rank 0, and an empty list on the others.

        Raises:
            RankError: a rank's value is an error; raised on all ranks.
        """
        values: list[T | Exception] | None = [value]
        if self.group is not None:
            values = [value] * self.size if self.rank == 0 else None
            dist.gather_object(value, values, group=self.group, group_dst=0)
        received: list[T] = []
        failed: RankError | None = None
        for rank, other in enumerate(values or ()):
            if not isinstance(other, Exception):
                received.append(other)
            elif failed is None:
                failed = RankError(rank, other)
        failed = self.from_rank(0, failed)
        if failed is not None:
            raise failed from failed.error
        return received

    def all(self, value: T) -> list[T]:
        """Return the value of every rank, by rank, on all ranks."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values
