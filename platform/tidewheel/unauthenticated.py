"""Limits on connections that have not yet shown the run's token.

Anybody on the network may connect. Until a connection is authenticated it gets little memory and little time, and only
a limited number of such connections is open.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator

HELLO_BYTES = 4096
"""Longest message of an unauthenticated connection."""
HELLO_SECONDS = 10.0
"""Time in all from connecting to showing the token."""
MAX_CONNECTIONS = 512
"""Each connection takes milliseconds. A server to which a whole cluster connects at once allows as many more."""


class UnauthenticatedConnections:
    """The unauthenticated connections of a server; one too many closes the oldest. Safe to use from several threads.

    Args:
        max_connections: number of connections that may be open at a time.
    """

    def __init__(self, max_connections: int = MAX_CONNECTIONS) -> None:
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._counter = itertools.count()
        self._closes: dict[int, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._closes)

    @contextlib.contextmanager
    def admitted(self, close: Callable[[], None]) -> Iterator[None]:
        """Count a connection during the block. The thread of another connection may call `close` meanwhile."""
        close_oldest = None
        with self._lock:
            connection = next(self._counter)
            self._closes[connection] = close
            if len(self._closes) > self._max_connections:
                close_oldest = self._closes.pop(min(self._closes))
        if close_oldest is not None:
            close_oldest()
        try:
            yield
        finally:
            with self._lock:
                self._closes.pop(connection, None)
