"""A driver that takes a run over from one that is frozen: the coordinator of that one still has the name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.util

from tests.unit.train.helpers import config
from tidewheel.elastic import coordinator, coordinator_actor
from tidewheel.errors import ClusterError, OwnershipError
from tidewheel.ownership import acquire
from tidewheel.storage import store


class Actor:
    """An actor all of whose methods do nothing."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: None)


class Cluster:
    """A stand-in for Ray's table of named actors, with the former driver's coordinator."""

    def __init__(self, *, dies: bool) -> None:
        self.killed: list[Any] = []
        self.former: Actor | None = Actor()
        self._dies = dies

    def remote(self, kind: type) -> Any:
        def create(*arguments: Any, **named: Any) -> Actor:
            if self.former is not None:
                raise ValueError(f"the name {self.name} is taken")
            return Actor()

        def options(name: str, **more: Any) -> Any:
            self.name = name
            return SimpleNamespace(remote=create)

        return SimpleNamespace(options=options)

    def get_actor(self, name: str, namespace: str) -> Actor:
        assert self.former is not None
        return self.former

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)
        if self._dies:
            self.former = None


def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, dies: bool, taken_again: bool = False) -> Cluster:
    """Start a coordinator beside the former one."""
    cluster = Cluster(dies=dies)
    for name in ("remote", "get_actor", "kill"):
        monkeypatch.setattr(ray, name, getattr(cluster, name))
    monkeypatch.setattr(ray, "get", lambda *arguments, **named: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "0" * 56))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(coordinator_actor, "TAKEN_SECONDS", 0.1)
    settings = config(tmp_path, "run")
    run = store(settings.run_uri)
    acquire(run)
    record = acquire(run, force=True)
    if taken_again:
        acquire(run, force=True)
    with coordinator_actor.coordinating(settings, (1,), record.epoch) as (name, _):
        assert name == coordinator.actor_name(settings.run_uri)
        assert len(cluster.killed) == 1
    return cluster


def test_the_coordinator_of_a_frozen_driver_is_ended(tmp_path, monkeypatch):
    former_and_own = start(tmp_path, monkeypatch, dies=True).killed
    assert len(former_and_own) == 2  # its own at the end of the block


def test_a_driver_that_no_longer_owns_the_run_ends_no_coordinator(tmp_path, monkeypatch):
    with pytest.raises(OwnershipError, match="was taken over by"):
        start(tmp_path, monkeypatch, dies=True, taken_again=True)


def test_a_coordinator_that_does_not_end_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(ClusterError, match="does not end"):
        start(tmp_path, monkeypatch, dies=False)
