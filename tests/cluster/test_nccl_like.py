"""Recovery in place as in `test_in_place.py`, on a backend that fails as NCCL does."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests import nccl_like
from tests.cluster.in_place import ONE_SAVE, SMALL, Group, finished, prepare
from tests.unit.train.helpers import config
from tidewheel.checkpoint.digest import digest
from tidewheel.elastic.coordinator import Coordinator
from tidewheel.elastic.trainer import fit_local
from tidewheel.train.cuda_environment import prepare_environment

pytestmark = pytest.mark.cluster


def on_nccl(node: str, path: Path) -> None:
    """Give the worker the backend, and the environment of a worker with a GPU."""
    prepare_environment()
    nccl_like.install()


def test_workers_are_killed_and_frozen_and_the_bits_are_those_of_a_quiet_run(tmp_path, monkeypatch):
    monkeypatch.setattr(Coordinator, "_watch", lambda self: None)  # it would ask Ray
    group = Group(prepare(tmp_path, ONE_SAVE), tmp_path, fault=on_nccl)
    try:
        group.add("a", "b", anew=True)
        group.wait(lambda: group.step() >= 5)
        survivor = group.processes["a"].pid
        group.signal("b", signal.SIGKILL)
        group.wait(lambda: len(group.events("recovered")) == 1)
        group.add("c")
        group.wait(lambda: len(group.events("recovered")) == 2)
        group.add("d")
        group.wait(lambda: group.coordinator.standing_by() == 1)
        assert group.processes["a"].pid == survivor
        group.signal("c", signal.SIGSTOP)
        group.wait(lambda: len(group.events("recovered")) == 3)
        group.signal("c", signal.SIGCONT)
        group.wait(lambda: not group.processes["c"].is_alive())  # it notices that it was cut off
        finished(group)
    finally:
        group.end()
    assert group.processes["a"].pid == survivor
    assert [event["detail"]["world_size"] for event in group.events("start", "resume")] == [2, 1, 2, 2]
    assert [event["detail"]["recovery"] for event in group.events("failure")] == ["in_place", "in_place"]
    quiet = config(tmp_path, "quiet", *SMALL, "checkpoint.every_steps=25", "reproducible=true")
    fit_local(quiet)
    assert digest(group.settings.run_uri).state == digest(quiet.run_uri).state
