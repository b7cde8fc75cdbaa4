"""Wait for storage that is unavailable when a generation starts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tidewheel.errors import StorageAwayError
from tidewheel.time_limit import current
from tidewheel.train.config import TrainConfig
from tidewheel.train.runtime import Runtime

PAUSE_SECONDS = 2.0
T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """Retries a call while storage is unavailable. The call must not contain a collective: each rank waits alone."""

    seconds: float
    """How long to retry."""
    on_event: Callable[..., Any]

    @classmethod
    def of(cls, config: TrainConfig, runtime: Runtime) -> RetryPolicy:
        """Return the policy of a generation.

        The first generation does not retry, so that a wrong address is reported at once. Later ones retry for as long
        as the run tolerates failing saves.
        """
        settings = config.checkpoint
        limit = settings.max_failed_saves * settings.retry_seconds if settings.max_failed_saves else math.inf
        return cls(limit if runtime.generation else 0.0, runtime.control.event)

    def __call__(self, read: Callable[[], T]) -> T:
        """Return what `read` returns, once storage is available.

        Raises:
            StorageAwayError: storage was unavailable for too long, or the generation has ended.
        """
        until = time.monotonic() + self.seconds
        reported = False
        while True:
            try:
                return read()
            except StorageAwayError as error:
                if time.monotonic() >= until or not current().left:
                    raise
                if not reported:
                    self.on_event("storage_away", reason=error.what)
                reported = True
                current().pause(PAUSE_SECONDS)
