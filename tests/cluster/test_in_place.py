"""Recovery in place with real processes and real signals, without Ray."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.in_place import ONE_SAVE, SMALL, Group, finished, prepare
from tests.unit.train.helpers import config
from tidewheel.checkpoint.digest import digest
from tidewheel.elastic.coordinator import Coordinator
from tidewheel.elastic.trainer import fit_local
from tidewheel.report.explain.health import State
from tidewheel.report.explain.text import lines

pytestmark = pytest.mark.cluster


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Coordinator, "_watch", lambda self: None)  # it would ask Ray
    groups = []

    def start(**changes: Any) -> Group:
        settings = prepare(tmp_path, ONE_SAVE).model_copy(update=changes)
        groups.append(Group(settings, tmp_path))
        groups[-1].add("a", "b", anew=True)
        groups[-1].wait(lambda: groups[-1].step() >= 5)
        return groups[-1]

    yield start
    for group in groups:
        group.end()


def test_one_is_killed_one_joins_and_one_is_asked_to_leave(started):
    group = started()
    survivor = group.processes["a"].pid
    group.signal("b", signal.SIGKILL)
    group.wait(lambda: len(group.events("recovered")) == 1)  # with one worker; the new one comes later
    group.add("c")
    group.wait(lambda: len(group.events("recovered")) == 2)
    assert group.processes["a"].pid == survivor
    group.signal("a", signal.SIGTERM)
    group.wait(lambda: len(group.events("recovered")) == 3)
    group.wait(lambda: not group.processes["a"].is_alive())
    finished(group)
    assert [event["detail"]["world_size"] for event in group.events("start", "resume")] == [2, 1, 2, 1]
    [failure] = group.events("failure")
    assert failure["detail"]["recovery"] == "in_place"
    assert failure["detail"]["ranks"] == [1]
    changes = [event["detail"] for event in group.events("resize")]
    assert [(one["from"], one["to"], one["reason"]) for one in changes] == [(1, 2, "join"), (2, 1, "drain")]
    assert [event["detail"]["redo"] for event in group.events("resume")[1:]] == [0, 0]
    told = group.told()
    assert told.health.state is State.FINISHED
    assert [item.cause.key for item in told.incidents] == ["start", "worker_killed", "join", "drain"]
    killed = told.incidents[1]
    assert (killed.nodes, killed.ranks, killed.workers) == (("node of b"[:12],), (1,), (2, 1))
    assert killed.pause > 0
    assert killed.seconds > 0
    assert any("worker process ended on node of b (rank 1)" in line for line in lines(told))


def test_a_frozen_worker_is_cut_off_and_one_that_stands_by_takes_its_place(started):
    group = started()
    group.add("c")
    group.wait(lambda: group.coordinator.standing_by() == 1)
    group.signal("a", signal.SIGSTOP)  # rank 0
    group.wait(lambda: group.coordinator.snapshot().generation == 1)
    group.signal("a", signal.SIGCONT)
    group.wait(lambda: not group.processes["a"].is_alive())  # it notices that it was cut off
    finished(group)
    assert [event["detail"]["world_size"] for event in group.events("start", "resume")] == [2, 2]
    still = config(group.folder, "still", *SMALL, "checkpoint.every_steps=25", "reproducible=true")
    fit_local(still)  # the survivor's rank changed and the world size did not: no state of its old rank may remain
    assert digest(group.settings.run_uri).state == digest(still.run_uri).state
    [failure] = group.events("failure")
    assert "no sign of life" in failure["detail"]["error"]
    causes = [item.cause.key for item in group.told().incidents]
    assert causes == ["start", "frozen"]


def test_a_run_survives_two_deaths_at_once(started):
    group = started()
    group.add("c")
    group.wait(lambda: group.coordinator.standing_by() == 1)
    group.signal("a", signal.SIGKILL)
    group.signal("b", signal.SIGKILL)
    finished(group)
    assert [event["detail"]["world_size"] for event in group.events("start", "resume")] in ([2, 1], [2, 2, 1])
