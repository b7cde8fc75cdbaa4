"""Wait for storage that is unavailable when a generation starts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tidewheel import retry
from tidewheel.errors import StorageAwayError
from tidewheel.time_limit import current
from tidewheel.train.config import TrainConfig
from tidewheel.train.runtime import Runtime

PAUSE_SECONDS = 2.0
"""Pauses between retries are random, up to this many seconds."""
T = TypeVar("T")


@dataclass(frozen=True)
class StorageWait:
    """Retries a call while storage is unavailable. The call must not contain a collective: each rank waits alone.

    The requests of the call share this budget instead of having one each.
    """

    seconds: float
    """How long to retry."""
    on_event: Callable[..., Any]

    @classmethod
    def of(cls, config: TrainConfig, runtime: Runtime) -> StorageWait:
        """Return the wait of a generation.

        The first generation does not retry, so that a wrong address is reported at once. Later ones retry for as long
        as the run tolerates failing saves.
        """
        return cls(limit_of(config) if runtime.generation else 0.0, runtime.control.event)

    def __call__(self, read: Callable[[], T]) -> T:
        """Return what `read` returns, once storage is available.

        Raises:
            StorageAwayError: storage was unavailable for too long, or the generation has ended.
        """
        if not self.seconds:
            return read()
        began = time.monotonic()
        reported = False

        def report(error: Exception) -> None:
            nonlocal reported
            outage = isinstance(error, StorageAwayError) or time.monotonic() - began >= retry.POLICY.budget_seconds
            if outage and not reported:  # a request that fails for a moment is no outage
                self.on_event("storage_away", reason=str(getattr(error, "what", error)))
                reported = True

        policy = retry.RetryPolicy(budget_seconds=self.seconds, pause_seconds=PAUSE_SECONDS,
                                   longest_pause_seconds=PAUSE_SECONDS)
        return retry.call(read, policy, on_retry=report,
                          may_help=lambda error: isinstance(error, StorageAwayError) and current().left > 0)


def limit_of(config: TrainConfig) -> float:
    """Return the seconds for which a run tolerates unavailable storage: those of its failing saves."""
    settings = config.checkpoint
    return settings.max_failed_saves * settings.retry_seconds if settings.max_failed_saves else math.inf
