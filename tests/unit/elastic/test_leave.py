"""A signal while workers train first requests a save, then ends the block. See test_stopping for other cases."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tidewheel.elastic import leave
from tidewheel.elastic.leave import leaving
from tidewheel.stopping import Stopped


@pytest.mark.parametrize(("step", "message"), [
    (12, "stopped, saved at step 12"), (None, "stopped, nothing new to save")])
def test_the_workers_save_before_the_run_ends(step, message, monkeypatch):
    asked = []
    monkeypatch.setattr(leave, "save_now", lambda uri, seconds: asked.append(uri) or step)

    def block() -> None:
        with leaving("runs/a"):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)

    with pytest.raises(Stopped, match=message):
        block()
    assert asked == ["runs/a"]
