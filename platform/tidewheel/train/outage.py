"""Storage that is away when a later generation of a run begins: it is waited for, as it is while a run saves."""

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
class Patience:
    """Tries a call again that needs nothing but storage. Never around a collective: each rank waits for itself."""

    seconds: float
    """For so long a call is tried again."""
    on_event: Callable[..., Any]

    @classmethod
    def of(cls, config: TrainConfig, runtime: Runtime) -> Patience:
        """None in the first generation, where a wrong address shall be told at once; later on as long as failing saves
        are put up with."""
        settings = config.checkpoint
        most = settings.max_failed_saves * settings.retry_seconds if settings.max_failed_saves else math.inf
        return cls(most if runtime.generation else 0.0, runtime.control.event)

    def __call__(self, read: Callable[[], T]) -> T:
        """What `read` returns, once storage is there.

        Raises:
            StorageAwayError: it was away for too long, or the generation has ended.
        """
        until, told = time.monotonic() + self.seconds, False
        while True:
            try:
                return read()
            except StorageAwayError as error:
                if time.monotonic() >= until or not current().left:
                    raise
                if not told:
                    self.on_event("storage_away", reason=error.what)
                told = True
                current().pause(PAUSE_SECONDS)
