"""When the demo kills a node and when it adds one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tidewheel.demo.disturbance import Disturbance


class Cluster:
    """Records what is done to it, and at which step of the run."""

    def __init__(self) -> None:
        self.nodes = [SimpleNamespace(node_id="a" * 56)]
        self.done: list[str] = []

    def kill_node(self, node: SimpleNamespace) -> list[int]:
        self.done.append("kill")
        return [1]

    def add_node(self) -> SimpleNamespace:
        self.done.append("join")
        return SimpleNamespace(node_id="b" * 56)


def steps_of_events(steps: int, seconds_per_step: float) -> dict[str, int]:
    """Return the step at which each event happens in a run of `steps` at an even pace."""
    cluster = Cluster()
    now = [0.0]
    disturbance = Disturbance(cluster, steps, clock=lambda: now[0])  # type: ignore[arg-type]
    events: dict[str, int] = {}
    for step in range(steps + 1):
        disturbance.on_progress({"step": step})
        for thread in disturbance._threads:
            thread.join()
        for event in cluster.done:
            events.setdefault(event, step)
        now[0] += seconds_per_step
    disturbance.finish()
    assert cluster.done == ["kill", "join"]
    return events


def test_a_long_run_loses_a_node_at_40_percent_and_gets_one_at_65() -> None:
    assert steps_of_events(1000, 0.5) == {"kill": 400, "join": 650}


def test_a_short_run_gets_its_node_as_soon_as_it_goes_on_without_the_killed_one() -> None:
    assert steps_of_events(100, 0.3) == {"kill": 40, "join": 41}


def test_the_node_joins_a_minute_before_the_end() -> None:
    assert steps_of_events(500, 0.25) == {"kill": 200, "join": 261}


def test_an_error_of_the_cluster_reaches_the_demo() -> None:
    class Broken(Cluster):
        def kill_node(self, node: SimpleNamespace) -> list[int]:
            raise RuntimeError("no such node")

    disturbance = Disturbance(Broken(), 10)  # type: ignore[arg-type]
    disturbance.on_progress({"step": 4})
    with pytest.raises(RuntimeError, match="no such node"):
        disturbance.finish()
