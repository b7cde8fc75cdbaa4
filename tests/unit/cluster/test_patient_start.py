"""Tests of the time that a new Ray node has to register."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ray._private import services

from tidewheel.cluster.patient_start import patient_start


def absent(times: int) -> Callable[..., Any]:
    """Return a table that does not have the node for so many requests."""
    asked = iter(range(times + 1))

    def get_node(address: str, node_id: str) -> dict[str, str]:
        if next(asked) < times:
            raise RuntimeError(f"no node {node_id}")
        return {"node_id": node_id}

    return get_node


def test_a_node_that_registers_late_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(services, "get_node", table := absent(3))
    with patient_start(interval=0):
        assert services.get_node("address", "a") == {"node_id": "a"}
    assert services.get_node is table


def test_the_wait_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(services, "get_node", absent(1_000_000))
    with patient_start(seconds=0, interval=0), pytest.raises(RuntimeError, match="no node a"):
        services.get_node("address", "a")
