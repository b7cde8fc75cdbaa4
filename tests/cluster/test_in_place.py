"""Recovery in place with real processes and real signals; without Ray, which only starts and buries them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import multiprocessing as _preloaded  # noqa: F401  the fork server that has imported torch
from tests.unit.train.helpers import config, write_shards
from tidewheel import jsonlog, storage
from tidewheel.checkpoint.digest import digest
from tidewheel.elastic.coordinator import Coordinator
from tidewheel.elastic.trainer import fit_local
from tidewheel.elastic.worker import notice, take_part
from tidewheel.train import loop
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def work(settings: TrainConfig, place: dict[str, Any], name: str) -> None:
    step, hurry = loop.train_step, Path(settings.run.uri) / "hurry"

    def slow_step(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.0 if hurry.exists() else 0.1)
        return step(*arguments, **named)

    loop.train_step = slow_step
    signal.signal(signal.SIGTERM, lambda *_: notice())  # in a cluster `ray_workers` does
    take_part(settings, place, name=name, node=f"node of {name}")


class Group:
    """A coordinator here, and workers of it."""

    def __init__(self, settings: TrainConfig, folder: Path) -> None:
        self.folder, self.settings, self.store = folder, settings, storage.store(settings.run_uri)
        self.processes: dict[str, Any] = {}
        self.coordinator = Coordinator(settings.run_uri, settings.elastic, (1, 2))
        self.coordinator.start("127.0.0.1")

    def add(self, *names: str, anew: bool = False) -> None:
        context = multiprocessing.get_context("forkserver")
        place = self.coordinator.place()
        self.coordinator.expect({name: f"node of {name}" for name in names}, anew)
        for name in names:
            self.processes[name] = context.Process(target=work, args=(self.settings, place, name), daemon=True)
            self.processes[name].start()

    def step(self) -> int:
        return int(self.coordinator.snapshot().progress.get("step", 0))

    def wait(self, condition: Callable[[], bool], seconds: float = 100.0) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, "\n".join(map(str, self.events()))
            time.sleep(0.005)

    def signal(self, name: str, number: int) -> float:
        os.kill(self.processes[name].pid, number)
        return time.time()

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        found = jsonlog.read(self.store, "events.jsonl")
        return [event for event in found if not kinds or event["kind"] in kinds]

    def first_step_after(self, generation: int) -> float:
        return next(line["time"] for line in jsonlog.read(self.store, "metrics.jsonl")
                    if line.get("generation") == generation)

    def end(self) -> None:
        self.coordinator.end()
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join()


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Coordinator, "_watch", lambda self: None)  # it asks Ray
    write_shards(tmp_path / "shards", rows=200)
    write_shards(tmp_path / "validation", shards=1, rows=11, seed=1)
    groups = []

    def start(**changes: Any) -> Group:
        settings = config(tmp_path, "run", "steps=150", "checkpoint.every_steps=25", "reproducible=true")
        limits = {"join_wait_seconds": 0.2, "resize_interval_seconds": 0.5, "heartbeat_seconds": 5.0}
        elastic = settings.elastic.model_copy(update=limits)
        settings = settings.model_copy(update={"elastic": elastic, **changes})
        groups.append(Group(settings, tmp_path))
        groups[-1].add("a", "b", anew=True)
        groups[-1].wait(lambda: groups[-1].step() >= 5)
        return groups[-1]

    yield start
    for group in groups:
        group.end()


def finished(group: Group) -> None:
    (Path(group.settings.run.uri) / "hurry").touch()
    group.wait(lambda: group.store.exists("result.json"))
    group.wait(lambda: not any(process.is_alive() for process in group.processes.values()), 20)
    found = audit(group.settings.run_uri)
    assert found.ok, found.summary()
    assert not group.events("save_failed")


def test_one_is_killed_one_joins_and_one_is_asked_to_leave(started):
    group = started()
    survivor, killed = group.processes["a"].pid, group.signal("b", signal.SIGKILL)
    group.add("c")
    group.wait(lambda: group.coordinator.snapshot().generation == 1 and group.step() > 5)
    group.wait(lambda: group.coordinator.snapshot().generation == 2)
    assert group.processes["a"].pid == survivor
    group.wait(lambda: len(group.events("recovered")) == 2)
    group.signal("a", signal.SIGTERM)
    group.wait(lambda: group.coordinator.snapshot().generation == 3)
    group.wait(lambda: not group.processes["a"].is_alive(), 20)
    finished(group)
    assert [event["detail"]["world_size"] for event in group.events("start", "resume")] == [2, 1, 2, 1]
    [failure] = group.events("failure")
    assert failure["detail"]["recovery"] == "in_place"
    assert failure["detail"]["ranks"] == [1]
    changes = [event["detail"] for event in group.events("resize")]
    assert [(one["from"], one["to"], one["reason"]) for one in changes] == [(1, 2, "join"), (2, 1, "drain")]
    assert [event["detail"]["redo"] for event in group.events("resume")[1:]] == [0, 0]
    assert group.first_step_after(1) - killed < 10  # 0.2-0.4 s on an idle machine


def test_a_frozen_worker_is_cut_off_and_one_that_stands_by_takes_its_place(started):
    group = started()
    group.add("c")
    group.wait(lambda: group.coordinator.standing_by() == 1)
    stopped = group.signal("a", signal.SIGSTOP)  # rank 0
    group.wait(lambda: group.coordinator.snapshot().generation == 1)
    group.signal("a", signal.SIGCONT)
    group.wait(lambda: not group.processes["a"].is_alive(), 20)  # it finds itself cut off
    finished(group)
    assert [event["detail"]["world_size"] for event in group.events("start", "resume")] == [2, 2]
    still = config(group.folder, "still", "steps=150", "checkpoint.every_steps=25", "reproducible=true")
    fit_local(still)  # the survivor's rank has changed among as many: nothing of the old one may be left
    assert digest(group.settings.run_uri).state == digest(still.run_uri).state
    [failure] = group.events("failure")
    assert "no sign of life" in failure["detail"]["error"]
    assert group.first_step_after(1) - stopped < 25  # 5.5 s on an idle machine, 5 of them the limit


def test_two_die_at_once(started):
    group = started()
    group.add("c")
    group.wait(lambda: group.coordinator.standing_by() == 1)
    group.signal("a", signal.SIGKILL)
    group.signal("b", signal.SIGKILL)
    finished(group)
    assert [event["detail"]["world_size"] for event in group.events("start", "resume")] in ([2, 1], [2, 2, 1])
