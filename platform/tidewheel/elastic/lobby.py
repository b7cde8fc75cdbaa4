"""Workers that wait for the memory agent of their node before they may have a rank."""

from __future__ import annotations

import time
from collections.abc import Callable

from tidewheel.elastic.agent_supervisor import AgentSupervisor
from tidewheel.elastic.messages import Hello

AGENT_SECONDS = 10.0
"""A worker waits this long for the memory agent of its node, then trains without one."""


class Lobby:
    """Keeps them.

    Args:
        admit: called when a worker's wait is over.
    """

    def __init__(self, admit: Callable[[Hello], None]) -> None:
        self._admit = admit
        self._waiting: dict[str, tuple[Hello, float]] = {}

    def enter(self, hello: Hello, agents: AgentSupervisor | None) -> None:
        """Admit a worker at once if the agent of its node is known, or without a memory tier."""
        if agents is None or agents.has(hello.node):
            self._admit(hello)
        else:
            agents.want([hello.node])
            self._waiting[hello.name] = (hello, time.monotonic())

    def leave(self, name: str) -> None:
        """Forget a worker that is gone."""
        self._waiting.pop(name, None)

    def look(self, agents: AgentSupervisor | None, now: float) -> None:
        """Admit the workers whose agents are known by now, and those that have waited long enough."""
        for name, (hello, since) in list(self._waiting.items()):
            if agents is None or agents.has(hello.node) or now - since > AGENT_SECONDS:
                del self._waiting[name]
                self._admit(hello)
