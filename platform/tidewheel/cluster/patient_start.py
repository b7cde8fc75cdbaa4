"""Give a Ray node that starts on a busy machine more time than Ray does.

Ray waits 30 s, a number in its code, until a new node is in the cluster's table. A machine whose cores are shared with
dozens of other processes needs longer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

START_SECONDS = 120.0


@contextlib.contextmanager
def patient_start(seconds: float = START_SECONDS, interval: float = 0.2) -> Iterator[None]:
    """Let a node that starts in the block have `seconds` to register; ask every `interval` seconds."""
    from ray._private import services

    before = services.get_node

    def get_node(*arguments: Any, **named: Any) -> Any:
        until = time.monotonic() + seconds
        while True:
            try:
                return before(*arguments, **named)
            except RuntimeError:  # the table does not have the node yet
                if time.monotonic() > until:
                    raise
                time.sleep(interval)

    services.get_node = get_node  # type: ignore[assignment]
    try:
        yield
    finally:
        services.get_node = before
