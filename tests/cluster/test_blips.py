"""Workers survive while the coordinator cannot be reached. Real processes, without Ray."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.in_place import LAST_STEPS, SMALL, work
from tests.ranks import multiprocessing as _preloaded  # noqa: F401  the fork server that has imported torch
from tests.unit.elastic.network import network
from tests.unit.train.helpers import config, write_shards
from tidewheel import jsonlog, storage
from tidewheel.elastic.connection import SILENT_SECONDS
from tidewheel.elastic.coordinator import Coordinator
from tidewheel.ownership import acquire
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig

pytestmark = pytest.mark.cluster
CONTEXT = multiprocessing.get_context("forkserver")
BLIP_SECONDS = SILENT_SECONDS + 2.0
"""Longer than the kernel keeps a connection without acknowledgements."""
NAMES = ("a", "b")


def coordinate(settings: TrainConfig, pipe: Any) -> None:
    """Run a coordinator in this process until a message arrives on the pipe."""
    Coordinator._watch = lambda self: None  # type: ignore[method-assign]  # it would ask Ray
    coordinator = Coordinator(settings.run_uri, settings.elastic, (1, 2),
                              epoch=acquire(storage.store(settings.run_uri)).epoch)
    coordinator.start("127.0.0.1")
    endpoint = coordinator.endpoint()
    coordinator.expect({name: f"node of {name}" for name in NAMES}, True)
    pipe.send(endpoint)
    pipe.recv()
    coordinator.end()


class Run:
    """A run of two workers, whose coordinator is behind a network that can fail."""

    def __init__(self, folder: Path) -> None:
        write_shards(folder / "shards", rows=200)
        settings = config(folder, "run", *SMALL, "checkpoint.every_steps=25", "data.validation=''",
                          "elastic.heartbeat_seconds=3")
        self.store, self.uri, self._hurry = storage.store(settings.run_uri), settings.run_uri, folder
        self._pipe, theirs = CONTEXT.Pipe()
        self.coordinator = CONTEXT.Process(target=coordinate, args=(settings, theirs), daemon=True)
        self.coordinator.start()
        endpoint = self._pipe.recv()
        self._opened = network(endpoint.address)
        self.network = self._opened.__enter__()
        endpoint = replace(endpoint, address=self.network.address)
        arguments = [(settings, endpoint, name, f"node of {name}", None) for name in NAMES]
        self.workers = [CONTEXT.Process(target=work, args=argument, daemon=True) for argument in arguments]
        for worker in self.workers:
            worker.start()
        self.settings = settings

    def steps(self) -> int:
        """Return the number of steps that rank 0 has recorded."""
        return max((line["step"] for line in jsonlog.read(self.store, "batches.jsonl")), default=0)

    def stands_still(self) -> bool:
        """Return whether no step ends within two seconds; a step takes a tenth of one."""
        before = self.steps()
        time.sleep(2.0)
        return self.steps() == before

    def wait(self, condition: Callable[[], bool], seconds: float = 600.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "\n".join(map(str, jsonlog.read(self.store, "events.jsonl")))
            alive = all(worker.is_alive() for worker in self.workers)
            assert alive, "\n".join(map(str, jsonlog.read(self.store, "events.jsonl")))
            time.sleep(0.05)

    def finish(self) -> list[dict[str, Any]]:
        """Let the run finish, and return its events."""
        (Path(self.settings.run.uri) / "hurry").touch()
        end = time.monotonic() + 600
        while not self.store.exists("result.json"):
            assert time.monotonic() < end
            time.sleep(0.05)
        self._pipe.send("end")
        self.coordinator.join(120)
        return jsonlog.read(self.store, "events.jsonl")

    def end(self) -> None:
        self._opened.__exit__(None, None, None)
        for process in (self.coordinator, *self.workers):
            if process.is_alive():
                process.kill()
            process.join()


@pytest.fixture
def run(tmp_path: Path):
    made = Run(tmp_path)
    try:
        made.wait(lambda: made.steps() >= 5)
        yield made
    finally:
        made.end()


def same_generation(run: Run, events: list[dict[str, Any]]) -> None:
    assert audit(run.uri).ok, audit(run.uri).summary()
    assert [event["detail"]["world_size"] for event in events if event["kind"] in ("start", "resume")] == [2]
    assert not [event for event in events if event["kind"] in ("failure", "resize")]


def test_a_run_survives_a_network_outage_longer_than_a_connection(run):
    run.network.away()
    time.sleep(BLIP_SECONDS)
    run.wait(run.stands_still)  # rank 0 waits, since it may have been replaced
    held = run.steps()
    assert held <= run.settings.steps - LAST_STEPS  # steps after that are slow anyway
    run.network.back()
    run.wait(lambda: run.steps() > held)
    events = run.finish()
    same_generation(run, events)
    back = [event["detail"]["worker"] for event in events if event["kind"] == "worker_reconnected"]
    assert sorted(back) == list(NAMES)


def test_a_run_survives_a_stopped_coordinator(run):
    os.kill(run.coordinator.pid, signal.SIGSTOP)
    time.sleep(BLIP_SECONDS)
    run.network.reset()  # some workers lose their connection and must wait for the process
    time.sleep(1)
    os.kill(run.coordinator.pid, signal.SIGCONT)
    since = run.steps()
    run.wait(lambda: run.steps() > since)
    same_generation(run, run.finish())
