"""Workers that wait for the memory agent of their node before they may have a rank."""

from __future__ import annotations

import time
from collections.abc import Callable

from tidewheel.elastic.messages import Hello

AGENT_SECONDS = 10.0
"""A worker waits this long for the memory agent of its node, then trains without one."""


class Lobby:
    """Keeps the workers that wait.

    Args:
        admit: called when a worker's wait is over.
        is_ready: returns whether the workers of a node, named by its id, need not wait.
    """

    def __init__(self, admit: Callable[[Hello], None], is_ready: Callable[[str], bool]) -> None:
        self._admit = admit
        self._is_ready = is_ready
        self._waiting: dict[str, tuple[Hello, float]] = {}

    def enter(self, hello: Hello) -> None:
        """Admit a worker, at once if its node is ready."""
        if self._is_ready(hello.node):
            self._admit(hello)
        else:
            self._waiting[hello.name] = (hello, time.monotonic())

    def leave(self, name: str) -> None:
        """Forget a worker that is gone."""
        self._waiting.pop(name, None)

    def look(self, now: float) -> None:
        """Admit the workers whose nodes are ready by now, and those that have waited long enough."""
        for name, (hello, since) in list(self._waiting.items()):
            if self._is_ready(hello.node) or now - since > AGENT_SECONDS:
                del self._waiting[name]
                self._admit(hello)
