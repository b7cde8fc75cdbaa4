"""The retry policy of every store: how long a request may take, and how long a failing one is tried again.

All retries happen in `call`. The clients underneath (botocore, s3fs, gcsfs, the Azure SDK, aiohttp) try once. A call
inside another call shares the outer budget, so nested retries never multiply.
"""

from __future__ import annotations

import contextvars
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tidewheel import time_limit

logger = logging.getLogger(__name__)
T = TypeVar("T")
JITTER = random.Random()
"""For pauses. Python's shared generator belongs to the user: a pause must not change what a transform or a run draws
from it."""
LOUD_TRY = 3
"""The first retry of a call is ordinary; from this try on, retries are logged as warnings."""


@dataclass(frozen=True)
class RetryPolicy:
    """Deadlines of requests, and the budget for their retries."""

    request_seconds: float = 10.0
    """Deadline of a request that moves no data. A request past its deadline is cancelled and tried again."""
    least_bytes_per_second: float = 256 << 10
    """A request that moves data gets extra time at this throughput. Downloads must keep it up while they run."""
    budget_seconds: float = 30.0
    """The last try of a call begins within this time, plus the time that its data takes at the least throughput."""
    pause_seconds: float = 0.2
    """Pauses between tries are random, up to 0.2, 0.4, 0.8 ... seconds ("full jitter", M. Brooker, AWS Architecture
    Blog, 2015)."""
    longest_pause_seconds: float = 8.0

    def transfer_seconds(self, nbytes: int) -> float:
        """Return the seconds that `nbytes` take at the least throughput."""
        return nbytes / self.least_bytes_per_second

    def pause(self, tries: int) -> float:
        """Return a random number of seconds to wait after the failed try number `tries`, counted from 1."""
        return JITTER.random() * min(self.longest_pause_seconds, self.pause_seconds * 2 ** min(tries - 1, 16))


POLICY = RetryPolicy()
"""The policy of stores that are made without one."""


@dataclass(frozen=True)
class _Call:
    """An outer call whose budget inner calls share."""

    until: float
    on_retry: Callable[[Exception], None] | None

    def retried(self, error: Exception) -> None:
        if self.on_retry is not None:
            self.on_retry(error)


_outer: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("outer call", default=None)


def is_nested() -> bool:
    """Return whether this thread is inside a `call`, whose budget the next one will share."""
    return _outer.get() is not None


def call(attempt: Callable[[], T], policy: RetryPolicy, *, may_help: Callable[[Exception], bool],
         extra_seconds: Callable[[], float] = lambda: 0.0, on_retry: Callable[[Exception], None] | None = None) -> T:
    """Return `attempt()`, tried again while that may help and the budget lasts.

    Args:
        attempt: one try.
        policy: the budget, and the pauses between tries. Inside another call, its budget counts instead.
        may_help: whether another try may end better after this error.
        extra_seconds: seconds that are added to the budget; asked after each failed try.
        on_retry: called with the error before each new try, also those of calls inside this one.

    Raises:
        StorageAwayError: the thread's time limit has passed, see `time_limit`.
        Exception: the error of the last try, with a note about the number of tries.
    """
    limit = time_limit.current()
    began = time.monotonic()
    shared = _outer.get() or _Call(began + policy.budget_seconds, on_retry)
    token = _outer.set(shared)
    tries = 0
    try:
        while True:
            limit.check()
            tries += 1
            try:
                return attempt()
            except Exception as error:
                if not may_help(error):
                    raise
                pause = policy.pause(tries)
                now = time.monotonic()
                if now + pause >= shared.until + extra_seconds():
                    if tries > 1:
                        error.add_note(f"{tries} tries in {now - began:.0f} s")
                    raise
                level = logging.INFO if tries < LOUD_TRY else logging.WARNING
                logger.log(level, "try %d failed, the next one begins in %.1f s: %s: %s", tries, pause,
                           type(error).__name__, error)
                shared.retried(error)
            limit.pause(pause)
    finally:
        _outer.reset(token)
