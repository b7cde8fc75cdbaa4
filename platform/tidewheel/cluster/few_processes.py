"""Start Ray without the processes that serve a dashboard, a log stream or an autoscaler.

On every head Ray starts four Python processes beside its own two, and waits for one of them. A private cluster of one
command uses none of the four; without them it starts and ends in half the time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def few_processes() -> Iterator[None]:
    """Let `ray.init` in the block start only Ray's server, the raylet and its agents, if without a dashboard."""
    from ray._private import parameter

    before = parameter.RayParams
    parameter.RayParams = functools.partial(before, no_monitor=True, include_log_monitor=False)  # type: ignore
    try:
        with no_idle_api_server():
            yield
    finally:
        parameter.RayParams = before  # type: ignore[misc]


@contextlib.contextmanager
def no_idle_api_server() -> Iterator[None]:
    """Let a head that starts in the block have an API server only if it has a dashboard."""
    from ray._private import services

    before = services.start_api_server

    def start(include_dashboard: bool | None, *arguments: Any, **named: Any) -> tuple[str | None, Any]:
        return before(include_dashboard, *arguments, **named) if include_dashboard else ("", None)

    services.start_api_server = start  # type: ignore[assignment]
    try:
        yield
    finally:
        services.start_api_server = before
