"""Tell the readers of a folder in this process that something new is in it, so that they need not look for it.

A writer in another process is not heard: readers still look from time to time, but seldom while a writer of this
process has promised to tell.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator

PROMISED_SECONDS = 0.5
"""A reader waits this long at most for a writer that has promised to tell: other requests must be heard."""
_changed = threading.Condition()
_told: Counter[str] = Counter()
_promises: Counter[str] = Counter()


@contextlib.contextmanager
def promised(uri: str) -> Iterator[None]:
    """Promise, for the block, that this process tells of all that is new at `uri`."""
    with _changed:
        _promises[uri] += 1
    try:
        yield
    finally:
        with _changed:
            _promises[uri] -= 1
            _changed.notify_all()


def tell(uri: str) -> None:
    """Wake those who wait for news at `uri`."""
    with _changed:
        _told[uri] += 1
        _changed.notify_all()


def told(uri: str) -> int:
    """Return how often this process was told of `uri`."""
    return _told[uri]


def wait(uri: str, seconds: float, since: int) -> None:
    """Wait for news, or for some seconds; if a writer has promised to tell, for up to `PROMISED_SECONDS`.

    Args:
        uri: of the folder.
        seconds: between two looks of a reader who is not told.
        since: what `told` returned before the reader looked last.
    """
    end = time.monotonic() + (max(seconds, PROMISED_SECONDS) if _promises[uri] > 0 else seconds)
    with _changed:
        while _told[uri] == since and (left := end - time.monotonic()) > 0:
            _changed.wait(left)
