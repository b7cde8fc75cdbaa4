"""A run without Ray: its workers are plain processes, and the test's own process has the coordinator."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.ranks import multiprocessing as _preloaded  # noqa: F401  the fork server that has imported torch
from tests.unit.train.helpers import config, write_shards
from tidewheel import jsonlog, storage
from tidewheel.elastic.connection import Endpoint
from tidewheel.elastic.coordinator import Coordinator
from tidewheel.elastic.worker import notice, take_part
from tidewheel.ownership import acquire
from tidewheel.report.explain.account import Account, account
from tidewheel.report.explain.causes import CAUSES
from tidewheel.train import loop
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig

Fault = Callable[[str, Path], None]
"""Called in each worker with its node and a path before the worker joins. It breaks something once that file exists."""
STEP_SECONDS, LATE_STEP_SECONDS, LAST_STEPS = 0.1, 5.0, 40
SMALL = ("steps=150", "model.num_layers=1", "batch.virtual_ranks=2", "batch.micro_sequences=4",
         "evaluation.every_steps=0", "checkpoint.memory_tier.every_steps=1")
"""Settings of runs with quick steps, for tests of the workers."""
ONE_SAVE = "checkpoint.every_steps=100000"
"""Setting of runs in which no save may fail: a worker lost during a save would rightly fail it."""
PATIENT = {"start_timeout_seconds": 3000.0, "heartbeat_seconds": 60.0, "leave_seconds": 60.0}
"""Limits for a busy machine, as keywords of `prepare`. A killed worker is noticed at once: its connection closes."""
SLOW = CAUSES["slow_worker"]


def slow_steps(settings: TrainConfig, hurry: Path) -> None:
    """Let this process take its steps slowly until the file `hurry` exists, and the last ones so slowly that the run
    cannot end before the test does."""
    step = loop.Loop._enqueue

    def slow_step(self: loop.Loop, number: int, *arguments: Any) -> Any:
        late = number > settings.steps - LAST_STEPS
        until = time.monotonic() + (LATE_STEP_SECONDS if late else STEP_SECONDS)
        while not hurry.exists() and time.monotonic() < until:
            time.sleep(0.02)
        return step(self, number, *arguments)

    loop.Loop._enqueue = slow_step  # type: ignore[method-assign]


def work(settings: TrainConfig, endpoint: Endpoint, name: str, node: str, fault: Fault | None) -> None:
    """Run a worker with slow steps until a file "hurry" exists beside the run."""
    slow_steps(settings, Path(settings.run.uri) / "hurry")
    if fault is not None:
        fault(node, Path(settings.run.uri) / "fault")
    signal.signal(signal.SIGTERM, lambda *_: notice())  # on a cluster, `ray_process` installs it
    take_part(settings, endpoint, name=name, node=node)


class Group:
    """A coordinator in this process, and its workers."""

    def __init__(self, settings: TrainConfig, folder: Path, sizes: tuple[int, ...] = (1, 2),
                 fault: Fault | None = None) -> None:
        self.folder, self.settings, self.store = folder, settings, storage.store(settings.run_uri)
        self.fault = fault
        self.processes: dict[str, Any] = {}
        self.coordinator = Coordinator(settings.run_uri, settings.elastic, sizes, epoch=acquire(self.store).epoch,
                                       node_history=settings.run.uri)
        self.coordinator.start("127.0.0.1")

    def add(self, *names: str, anew: bool = False, node: str = "") -> None:
        context = multiprocessing.get_context("forkserver")
        endpoint = self.coordinator.endpoint()
        nodes = {name: node or f"node of {name}" for name in names}
        self.coordinator.expect(nodes, anew)
        for name in names:
            arguments = (self.settings, endpoint, name, nodes[name], self.fault)
            self.processes[name] = context.Process(target=work, args=arguments, daemon=True)
            self.processes[name].start()

    def step(self) -> int:
        return int(self.coordinator.snapshot().progress.get("step", 0))

    def wait(self, condition: Callable[[], bool], seconds: float = 600.0) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, "\n".join(map(str, self.events()))
            time.sleep(0.005)

    def signal(self, name: str, number: int) -> None:
        os.kill(self.processes[name].pid, number)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        result = jsonlog.read(self.store, "events.jsonl")
        return [event for event in result if not kinds or event["kind"] in kinds]

    def told(self) -> Account:
        """Return what `explain` tells, without the slow workers of a busy machine."""
        told = account(self.settings.run_uri)
        kept = tuple(item for item in told.incidents if item.cause is not SLOW)
        repeaters: dict[str, Counter[str]] = {}
        for node, counts in told.repeaters.items():
            others = Counter({title: times for title, times in counts.items() if title != SLOW.title})
            if others.total() > 1:
                repeaters[node] = others
        return replace(told, incidents=kept, repeaters=repeaters)

    def end(self) -> None:
        self.coordinator.end()
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join()


def prepare(folder: Path, *overrides: str, **elastic: Any) -> TrainConfig:
    """Write shards to `folder`, and return the settings of a run over them that resizes and notices losses quickly."""
    write_shards(folder / "shards", rows=200)
    write_shards(folder / "validation", shards=1, rows=11, seed=1)
    settings = config(folder, "run", *SMALL, "checkpoint.every_steps=25", "reproducible=true", *overrides)
    limits = {"join_wait_seconds": 0.2, "resize_interval_seconds": 0.5, "heartbeat_seconds": 5.0, **elastic}
    return settings.model_copy(update={"elastic": settings.elastic.model_copy(update=limits)})


def finished(group: Group, seconds: float = 600.0) -> None:
    (Path(group.settings.run.uri) / "hurry").touch()
    group.wait(lambda: group.store.exists("result.json"), seconds)
    group.wait(lambda: not any(process.is_alive() for process in group.processes.values()), seconds)
    audited = audit(group.settings.run_uri)
    assert audited.ok, audited.summary()
    assert not group.events("save_failed")
