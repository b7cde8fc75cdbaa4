"""What holds for every unit test: it leaves no thread behind that goes on working."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

WORKING = ("end of log ", "log ", "run owner", "lease ", "state of the run", "metrics", "end of metrics", "hang watch",
           "memory agent")
"""Threads whose names begin so write to storage or beat: one that outlives its test disturbs the next."""
GRACE_SECONDS = 30.0
"""A thread that was told to end gets this long, as machines are busy."""


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    """Fail a test that leaves a thread which goes on working. Threads of a wider fixture are there before."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread.name.startswith(WORKING) and thread not in before]
    until = time.monotonic() + GRACE_SECONDS
    for thread in left:
        thread.join(max(0.0, until - time.monotonic()))
    names = [thread.name for thread in left if thread.is_alive()]
    assert not names, f"the test leaves threads that go on working: {names}"
