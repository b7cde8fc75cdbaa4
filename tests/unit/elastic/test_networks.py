"""Bad networks between coordinator and workers: delay, loss, slow links, partitions in one direction, and resets."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.unit.elastic.light_team import Team, team
from tidewheel.elastic import server
from tidewheel.elastic.coordinator import Coordinator

HEARTBEAT = 2.0
LIMITS = {"heartbeat_seconds": HEARTBEAT, "leave_seconds": 1.0}
NAMES = ("a", "b", "c")


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coordinator, "_watch", lambda self: None)


def at_rank(group: Team, rank: int) -> str:
    """Return the worker at a rank."""
    return next(name for name, worker in group.workers.items() if worker.joined and worker.joined[-1].rank == rank)


def silent_seconds(group: Team, name: str) -> float:
    """Return the seconds since the coordinator has heard a worker."""
    return time.monotonic() - group.coordinator._membership.workers[name].beat


def test_delay_and_loss_below_the_limits_cut_nobody_off(tmp_path: Path) -> None:
    with team(tmp_path, *NAMES, heartbeat_seconds=HEARTBEAT) as group:
        for name in ("a", "b"):
            for way in (group[name].link.up, group[name].link.down):
                way.delay = 0.3
                way.loss = 0.1
        arrived = group["a"].link.up.delivered
        group.wait(lambda: group["a"].link.up.delivered > arrived + 1500)
        assert group.coordinator.fenced() == set()
        group["c"].close()
        group.trains(1, "a", "b")
        assert group.coordinator.fenced() == set()
        assert not group.events("worker_reconnected")
        [failure] = group.events("failure")
        assert "its process has ended" in failure["error"]


def test_a_worker_that_is_not_heard_is_the_only_one_left_out(tmp_path: Path) -> None:
    """It hears the coordinator, but is cut off from the other workers too, which wait for it."""
    with team(tmp_path, *NAMES, **LIMITS) as group:
        lost = at_rank(group, 0)
        group[lost].link.up.held = True
        group[lost].stands = True
        others = [name for name in NAMES if name != lost]
        group.trains(1, *others)
        assert group.coordinator.fenced() == {lost}
        [failure] = group.events("failure")
        assert "no sign of life" in failure["error"]
        group[lost].link.up.held = False
        assert group[lost].ended.wait(60)  # it returns, and learns that the run goes on without it
        assert group[lost].generation == 0
        assert group.coordinator.fenced() == {lost}
        assert group.coordinator.snapshot().generation == 1


def test_a_worker_that_is_not_heard_and_trains_is_kept(tmp_path: Path) -> None:
    with team(tmp_path, *NAMES, **LIMITS) as group:
        unheard = at_rank(group, 2)
        group[unheard].link.up.held = True
        group.wait(lambda: silent_seconds(group, unheard) > 2 * HEARTBEAT)
        assert group.coordinator.fenced() == set()
        group[unheard].link.up.held = False
        group.wait(lambda: silent_seconds(group, unheard) < HEARTBEAT)
        step = group[unheard].step
        group.trains(0, *NAMES, steps=step + 2)
        assert group.coordinator.fenced() == set()
        assert not group.events("worker_reconnected")


def test_a_worker_that_does_not_hear_of_an_abort_is_the_only_one_left_out(tmp_path: Path) -> None:
    with team(tmp_path, *NAMES, "d", **LIMITS) as group:
        group["b"].link.down.held = True
        group["d"].close()
        group.trains(1, "a", "c")
        assert group.coordinator.fenced() == {"b"}


def test_a_standby_worker_that_does_not_hear_is_left_out_when_it_gets_a_rank(tmp_path: Path) -> None:
    """Its heartbeats arrive, so it is not silent; the others waited for it for five minutes."""
    with team(tmp_path, *NAMES, sizes=(1, 2), **LIMITS) as group:
        deaf = next(name for name in NAMES if group[name].generation < 0)
        group[deaf].link.down.held = True
        group[at_rank(group, 1)].close()
        survivor = at_rank(group, 0)
        group.trains(2, survivor)
        assert group.coordinator.fenced() == {deaf}
        assert "has acknowledged no message" in group.events("failure")[-1]["error"]


def test_a_slow_link_does_not_hold_up_the_abort_of_the_others(tmp_path: Path) -> None:
    with team(tmp_path, *NAMES, heartbeat_seconds=HEARTBEAT, leave_seconds=60.0) as group:
        slow = at_rank(group, 0)  # it is told first
        group[slow].link.down.bytes_per_second = 1.0
        group[at_rank(group, 1)].close()
        other = at_rank(group, 2)
        group.wait(lambda: group[other].aborts == 1)
        assert group[slow].aborts == 0
        group[slow].link.down.bytes_per_second = 1e6
        group.trains(1, slow, other)
        assert group.coordinator.fenced() == set()


def test_connections_that_are_reset_are_rebuilt_in_the_same_generation(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "RESET_SECONDS", 60.0)  # a busy machine may stand still for the second that it is
    with team(tmp_path, *NAMES, **LIMITS) as group:
        def reset(link_of: str) -> None:
            for _ in range(3):
                before = len(group.events("worker_reconnected"))
                group[link_of].link.reset()
                group.wait(lambda: len(group.events("worker_reconnected")) > before)  # noqa: B023

        threads = [threading.Thread(target=reset, args=(name,)) for name in NAMES]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        group.trains(0, *NAMES, steps=group["a"].step + 2)
        assert {detail["worker"] for detail in group.events("worker_reconnected")} == set(NAMES)
        assert group.coordinator.fenced() == set()
        assert not group.events("failure")
