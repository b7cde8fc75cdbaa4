"""A fixture for every unit test: no test may leave a working thread behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

WORKING = ("end of log ", "log ", "run owner", "lease ", "state of the run", "metrics", "end of metrics", "hang watch",
           "memory agent")
"""Prefixes of the names of threads that write to storage or send beats, and would disturb the next test."""
GRACE_SECONDS = 120.0
"""Time for a stopped thread to end on a busy machine."""


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    """Fail a test that leaves a working thread behind, apart from threads of fixtures that started earlier."""
    before = set(threading.enumerate())
    yield
    remaining = [thread for thread in threading.enumerate() if thread.name.startswith(WORKING) and thread not in before]
    until = time.monotonic() + GRACE_SECONDS
    for thread in remaining:
        thread.join(max(0.0, until - time.monotonic()))
    names = [thread.name for thread in remaining if thread.is_alive()]
    assert not names, f"the test leaves working threads behind: {names}"
