"""In place of Ray Train's barrier actor: its workers report nothing through Ray, so nobody ever waits at one.

Ray's own imports all of Ray Train, seconds of processor time while the workers start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import ray


class NoBarrier:
    """What a worker group asks of the barrier when ranks are lost or replaced. Waiting at it is an error: it has no
    such method."""

    def __init__(self, **_: Any) -> None:
        pass

    def set_required_ranks(self, ranks: Collection[int] | None) -> bool:
        """Return False: there is nothing to narrow."""
        return False

    def reset(self) -> None:
        """Do nothing: nobody waits."""


@contextlib.contextmanager
def no_barrier() -> Iterator[None]:
    """Let worker groups that start in the block do without Ray Train's actor."""
    from ray.train.v2._internal.execution.worker_group import worker_group

    module: Any = worker_group
    before = module.SynchronizationActor
    module.SynchronizationActor = ray.remote(num_cpus=0)(NoBarrier)
    try:
        yield
    finally:
        module.SynchronizationActor = before
