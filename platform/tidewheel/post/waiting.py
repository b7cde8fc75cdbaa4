"""Wait for storage that is unavailable while rollouts are made, for as long as the run tolerates failing saves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from tidewheel.errors import StorageAwayError
from tidewheel.retry import JITTER
from tidewheel.train.config import TrainConfig
from tidewheel.train.storage_wait import limit_of

logger = logging.getLogger(__name__)
PAUSE_SECONDS = 1.0
"""Pauses between tries are random, up to this many seconds."""
T = TypeVar("T")


def patiently(function: Callable[[], T], config: TrainConfig, ended: threading.Event | None = None) -> T:
    """Return what a function returns, called again while storage is unavailable.

    Args:
        function: has the same effect when it is called again.
        config: the run's settings.
        ended: ends the wait.

    Raises:
        StorageAwayError: storage was unavailable for too long, or `ended` is set.
    """
    first: float | None = None
    while True:
        try:
            return function()
        except StorageAwayError as error:
            now = time.monotonic()
            if first is None:
                first = now
                logger.warning("rollouts wait for storage: %s", error)
            if now - first > limit_of(config):
                raise
            pause = PAUSE_SECONDS * JITTER.random()
            if ended is None:
                time.sleep(pause)
            elif ended.wait(pause):
                raise
