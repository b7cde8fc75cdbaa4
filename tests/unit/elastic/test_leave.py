"""SIGTERM while training: the save is asked for first, the block ends then; a second signal does not wait."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tidewheel.elastic import leave
from tidewheel.elastic.leave import Stopped, leaving_on_sigterm


def signalled(times: int) -> None:
    """What a block does while it is told to end."""
    with leaving_on_sigterm("runs/a"):
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
        time.sleep(5)


def test_saves_then_leaves(monkeypatch):
    asked = []
    monkeypatch.setattr(leave, "save_now", lambda uri, seconds: asked.append(uri) or 12)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match="saved at step 12"):
        signalled(1)
    assert asked == ["runs/a"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_does_not_wait(monkeypatch):
    slow, saved = threading.Event(), []
    monkeypatch.setattr(leave, "save_now", lambda uri, seconds: slow.wait(60) and saved.append(True))
    with pytest.raises(Stopped) as stopped:
        signalled(2)
    assert not saved
    slow.set()
    for thread in threading.enumerate():
        if thread.name == "save and leave":  # it must not signal a process whose block is over: that would end it
            thread.join(timeout=10)
    assert stopped.value.saved_step is None


def test_signals_are_left_alone_outside_the_main_thread():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def block() -> None:
        with leaving_on_sigterm("runs/a"):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert seen == [before]
