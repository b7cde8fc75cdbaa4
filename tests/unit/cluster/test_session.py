"""What a command prints while Ray starts, and when Ray does not start."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from tidewheel.cluster.session import session
from tidewheel.errors import ClusterError


def test_a_message_appears_before_ray_has_started(monkeypatch, capsys):
    def start(**_: Any) -> None:
        assert "starting Ray on this machine" in capsys.readouterr().err
        raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ClusterError, match="Ray did not come up within") as raised, session():
        pass
    assert "very busy" in str(raised.value)


def test_other_errors_keep_their_traceback(monkeypatch):
    def start(**_: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match="ours"), session("local"):
        pass
