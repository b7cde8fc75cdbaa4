"""Limits on connections that have not yet shown that they belong to the run.

Anybody on the network may connect. Until the run's token is shown, a connection gets little memory and little time,
and there are few of them.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator

HELLO_BYTES = 4096
"""Longest message of a stranger."""
HELLO_SECONDS = 10.0
"""From the connection to the token, all in all."""
MOST_STRANGERS = 512
"""At a time; a whole cluster connects at once when a generation begins, and each takes milliseconds."""


class Strangers:
    """Holds at most `most` connections; one more closes the oldest. Safe to use from several threads."""

    def __init__(self, most: int = MOST_STRANGERS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._closes: dict[int, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._closes)

    @contextlib.contextmanager
    def one(self, close: Callable[[], None]) -> Iterator[None]:
        """Count a connection during the block; `close` may be called, by the thread of another one."""
        oldest = None
        with self._lock:
            number = next(self._numbers)
            self._closes[number] = close
            if len(self._closes) > self._most:
                oldest = self._closes.pop(min(self._closes))
        if oldest is not None:
            oldest()
        try:
            yield
        finally:
            with self._lock:
                self._closes.pop(number, None)
