"""Ctrl-C and SIGTERM to a workflow's driver."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

import tidewheel as tw
from tidewheel.cluster import session
from tidewheel.stopping import Stopped
from tidewheel.workflow.schedule import Schedule
from tidewheel.workflow.workflow import run_spec


def nothing(output: str) -> None:
    """A step."""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_driver_stops_the_workflow(number, code, tmp_path, monkeypatch):
    """As `cancel` does, but told in one sentence, with the signal's exit code."""
    def run(schedule: Schedule) -> None:
        os.kill(os.getpid(), number)
        assert schedule._stop.wait(60)
        schedule._cancel()

    monkeypatch.setattr(session, "session", lambda address: contextlib.nullcontext())
    monkeypatch.setattr(Schedule, "run", run)
    spec = tw.Workflow("one", tw.Call("card", nothing)).spec(str(tmp_path / "out"))
    with pytest.raises(Stopped, match="what could be saved is saved; give the same command again") as stopped:
        run_spec(spec)
    assert stopped.value.exit_code == code
