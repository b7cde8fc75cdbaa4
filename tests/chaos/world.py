"""A local cluster with a run whose driver is restarted whenever it ends too early."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.unit.train.helpers import write_shards
from tidewheel import jsonlog
from tidewheel.cluster.local import LocalCluster, NodeHandle
from tidewheel.config import build
from tidewheel.storage import Store, store
from tidewheel.train.config import TrainConfig

LENGTH, VIRTUAL_RANKS, SAVE_EVERY = 64, 4, 20
REPOSITORY = Path(__file__).parents[2]


def settings(folder: Path, run_id: str, steps: int, *, workers: int, overrides: tuple[str, ...] = ()) -> TrainConfig:
    """Return the configuration of a small model over the shards in `folder`, for 1 to `workers` workers."""
    return build(TrainConfig, {
        "run": {"uri": str(folder / "runs"), "id": run_id}, "data": {"uri": str(folder / "shards"), "seed": 3},
        "steps": steps, "model": {"dim": 64, "num_layers": 2, "num_heads": 4, "tie_embeddings": True},
        "optimizer": {"learning_rate": 1e-4, "clip_norm": 0.5},
        "batch": {"global_sequences": 16, "micro_sequences": 4, "virtual_ranks": VIRTUAL_RANKS},
        "schedule": {"warmup_steps": 5}, "evaluation": {"sample_tokens": 0},
        "checkpoint": {"every_steps": SAVE_EVERY, "memory_tier": {"every_steps": 1}},
        "guards": {"collective_timeout_seconds": 5},
        "metrics": {"trackers": []},
        "elastic": {"min_workers": 1, "max_workers": workers, "join_wait_seconds": 1, "resize_interval_seconds": 2},
    }, overrides)


def prepare(folder: Path) -> None:
    """Write the shards that all runs read, if they do not exist."""
    if not (folder / "shards").exists():
        write_shards(folder / "shards", shards=4, rows=160, length=LENGTH)


@dataclass
class Driver:
    """A driver process: its start and end in seconds since the epoch, its exit code and the end of its stderr."""

    began: float
    ended: float = 0.0
    code: int | None = None
    killed: bool = False
    """Whether the test killed it."""
    with_workers: bool = False
    """Whether the test killed its workers too, so that nobody wrote the end of the ledger."""
    error: str = ""
    told: bool = False
    """Whether it has told of a step, so the run is its own."""


NEWEST_BYTES = 1 << 16
"""Bytes at the end of events.jsonl that are read for the newest events."""


@dataclass
class World:
    """The cluster and the run, on which events act."""

    cluster: LocalCluster
    config: TrainConfig
    folder: Path
    environment: dict[str, str]
    drivers: list[Driver] = field(default_factory=list)
    step: int = 0
    world_size: int = 0
    over: threading.Event = field(default_factory=threading.Event)
    closing: bool = False
    program: str = "tests.chaos.driver"
    """Module of the driver."""
    problems: list[str] = field(default_factory=list)
    """Problems that events found."""
    held: threading.Event = field(default_factory=threading.Event)
    """While it is set, no driver is started."""
    _process: subprocess.Popen[str] | None = None

    @property
    def run_store(self) -> Store:
        """Store of the run's folder."""
        return store(self.config.run_uri)

    @property
    def finished(self) -> bool:
        """Whether the run has written its result."""
        return self.run_store.exists("result.json")

    # -- the driver ----------------------------------------------------------------------------
    def supervise(self) -> None:
        """Start the driver, restart it until the run has finished, then set `over`. Runs in a thread."""
        file = self.folder / f"{self.config.run.id}.yaml"
        file.write_text(json.dumps(self.config.canonical()))  # JSON is YAML
        while not self.finished and not self.closing:
            if self.held.is_set():
                time.sleep(0.05)
                continue
            driver = Driver(time.time())
            errors = open(self.folder / f"driver-{len(self.drivers)}.err", "w+")  # noqa: SIM115
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.program, str(file), self.cluster.address], env=self.environment,
                cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=errors, text=True)
            self.drivers.append(driver)
            assert self._process.stdout is not None
            for line in self._process.stdout:
                with contextlib.suppress(ValueError):
                    progress = json.loads(line)
                    self.step = progress.get("step", self.step)
                    self.world_size = progress.get("world_size", self.world_size)
                    driver.told = driver.told or "step" in progress
            driver.code = self._process.wait()
            driver.ended = time.time()
            self._process.stdout.close()
            errors.seek(0)
            driver.error = errors.read()[-600:].strip()
            errors.close()
            time.sleep(0.5)
        self.over.set()

    def kill_driver(self, *, with_workers: bool = False) -> None:
        """Send SIGKILL to the driver; `supervise` starts the next one.

        Args:
            with_workers: whether the caller kills its workers too.
        """
        if self._process is not None and self._process.poll() is None:
            self.drivers[-1].killed, self.drivers[-1].with_workers = True, with_workers
            self._process.kill()

    @contextlib.contextmanager
    def frozen_driver(self) -> Iterator[bool]:
        """Stop the driver's process within the block; say whether there is one."""
        process = self._process
        if process is None or process.poll() is not None:
            yield False
            return
        process.send_signal(signal.SIGSTOP)
        try:
            yield True
        finally:
            process.send_signal(signal.SIGCONT)

    def beside(self, actor: str) -> list[int]:
        """Return the process ids of this run's actors of a class that are on the driver's node."""
        found = []
        for process in psutil.process_iter(["cmdline", "environ"]):
            ours = (process.info["environ"] or {}).get("CHAOS_NETWORK") == str(self.folder / "network")
            if ours and " ".join(process.info["cmdline"] or []).startswith(f"ray::{actor}"):
                found.append(process.pid)
        return found

    @property
    def driver_pid(self) -> int | None:
        """Process id of the driver, None if it does not run."""
        alive = self._process is not None and self._process.poll() is None
        return self._process.pid if self._process is not None and alive else None

    def second_driver(self, *overrides: str, seconds: float = 600.0) -> tuple[int | None, str]:
        """Start another driver of the run and return its exit code and stderr. Kill it after `seconds`."""
        file = self.folder / "second.yaml"
        values = build(TrainConfig, self.config.canonical(), overrides).canonical()
        file.write_text(json.dumps(values))
        process = subprocess.Popen([sys.executable, "-m", self.program, str(file), self.cluster.address],
                                   env=self.environment, cwd=REPOSITORY, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, text=True)
        try:
            _, error = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            _, error = process.communicate()
        return process.returncode, error.strip()

    def close(self) -> None:
        """Kill the driver and start no further one."""
        self.closing = True
        self.kill_driver()
        self.over.wait(timeout=30)

    # -- the state -------------------------------------------------------------------------------
    def driver_trains(self) -> bool:
        """Return whether the newest driver is alive and has told of a step.

        A run that waits for its gate tells of no further step.
        """
        newest = self.drivers[-1] if self.drivers else Driver(0.0)
        return newest.told and newest.code is None and not newest.killed

    def trainers(self) -> dict[int, NodeHandle]:
        """Return the process ids of the training workers and their nodes."""
        return processes(self.cluster, "RayTrainWorker")

    def generators(self) -> dict[int, NodeHandle]:
        """Return the process ids of the generators of rollouts and their nodes."""
        return processes(self.cluster, "ray::Generator")

    def node_of_rank(self, rank: int) -> NodeHandle | None:
        """Return the node of a rank in the ledger's newest record of it."""
        for record in reversed(jsonlog.read(self.run_store, "ledger.jsonl")):
            if record.get("rank") == rank:
                return next((node for node in self.cluster.nodes if node.node_id.startswith(record["node"])), None)
        return None

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the run's events of the given kinds, oldest first."""
        return [event for event in jsonlog.read(self.run_store, "events.jsonl") if event["kind"] in kinds]

    def has_done(self, step: int) -> bool:
        """Return whether the run has done a step: its driver has told so, or its files have it.

        A killed driver may have done steps that it has not told of.
        """
        if self.step >= step:
            return True
        resumed = [line for line in self._newest("events.jsonl") if line.get("kind") == "resume"]
        if not resumed:
            return False
        began, behind = resumed[-1]["time"], resumed[-1]["detail"]["step"]
        since = [line["step"] for line in self._newest("metrics.jsonl") if line["time"] > began and "step" in line]
        return max(behind, *since, 0) >= step

    def _newest(self, name: str) -> list[dict[str, Any]]:
        """Return the newest lines of one of the run's files of JSON lines."""
        file = Path(self.config.run_uri) / name
        if not file.exists():
            return []
        with file.open("rb") as lines:
            lines.seek(max(0, file.stat().st_size - NEWEST_BYTES))
            found = []
            for line in lines.read().decode(errors="replace").splitlines():
                with contextlib.suppress(ValueError):  # it is being written, or begins before the part that is read
                    found.append(json.loads(line))
        return [line for line in found if isinstance(line, dict)]

    def wait_for(self, condition: Any, seconds: float, poll: float = 0.05) -> bool:
        """Wait until `condition()` is true, and return False after `seconds` or the end of the run.

        Args:
            condition: called every `poll` seconds.
            seconds: longest wait.
            poll: seconds between two calls.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.over.is_set():
            if condition():
                return True
            time.sleep(poll)
        return False


def processes(cluster: LocalCluster, title: str) -> dict[int, NodeHandle]:
    """Return the process ids of the cluster's workers whose command line has a text, and their nodes."""
    raylets = {node.pid: node for node in cluster.nodes}
    workers = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if title not in (entry / "cmdline").read_text():
                continue
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in raylets:
                workers[int(entry.name)] = raylets[parent]
    return workers


@contextlib.contextmanager
def disturbed_run(folder: Path, config: TrainConfig, *, nodes: int, cpus_per_node: float = 1,
                  step_seconds: float = 0.0, program: str = "tests.chaos.driver",
                  **environment: str) -> Iterator[World]:
    """Start a cluster with a run on it; both end with the block."""
    with faults(folder, step_seconds, **environment), LocalCluster(nodes=nodes, cpus_per_node=cpus_per_node) as cluster:
        with supervised(World(cluster, config, folder, dict(os.environ), program=program)) as world:
            yield world


@contextlib.contextmanager
def supervised(world: World) -> Iterator[World]:
    """Start the run's driver again whenever it ends too early; the last one ends with the block."""
    thread = threading.Thread(target=world.supervise, name="driver", daemon=True)
    thread.start()
    try:
        yield world
    finally:
        world.close()
        thread.join(timeout=30)


@contextlib.contextmanager
def faults(folder: Path, step_seconds: float, **environment: str) -> Iterator[None]:
    """Set the environment variables of `tests.chaos.driver`, which processes that start in the block inherit.

    Args:
        folder: holds the files that request faults.
        step_seconds: added to each step.
        environment: further variables.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    added = {"CHAOS_STEP_SECONDS": str(step_seconds), "CHAOS_STORAGE_AWAY": str(folder / "storage-away"),
             "CHAOS_STORAGE_SILENT": str(folder / "storage-silent"), "CHAOS_NETWORK": str(folder / "network"),
             "CHAOS_SLOW": str(folder / "slow"),
             "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "platform"), str(REPOSITORY)]), **environment}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
