"""Training loses nodes and gains nodes, on a real cluster of three raylets with real SIGKILLs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray

from tidewheel import jsonlog
from tidewheel.checkpoint.digest import digest
from tidewheel.checkpoint.verify import list_checkpoints
from tidewheel.cluster.faults import drain_node
from tidewheel.cluster.local import LocalCluster, NodeHandle
from tidewheel.elastic.trainer import fit, fit_local, run_workers
from tidewheel.errors import ClusterError, ShardError
from tidewheel.shards.format import shard_schema, write_shard
from tidewheel.shards.manifest import Manifest, write_manifest
from tidewheel.storage import store
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig
from tidewheel.train.logs.read import LineFilter, RunLogs
from tidewheel.train.time_ledger import summarise

pytestmark = pytest.mark.cluster

LENGTH, VOCABULARY, ROWS = 64, 256, 640
SAVE_EVERY = 10


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(nodes=2, cpus_per_node=1) as running:
        ray.init(address=running.address, log_to_driver=False, logging_level="ERROR")
        yield running
        ray.shutdown()


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> str:
    """Write shards of random walks over the vocabulary, which a model can learn: two documents per row."""
    folder_store = store(tmp_path_factory.mktemp("shards"))
    random = np.random.default_rng(0)
    tokens = (np.cumsum(random.integers(0, 4, (ROWS, LENGTH)), axis=1) % (VOCABULARY - 2) + 2).astype(np.uint16)
    infos = []
    for part in np.split(np.arange(ROWS), 4):
        schema = shard_schema(LENGTH, "uint16")
        columns = {
            "tokens": pa.FixedSizeListArray.from_arrays(pa.array(tokens[part].ravel()), LENGTH),
            "length": pa.array([LENGTH] * len(part), pa.int32()),
            "segment_starts": pa.array([[0, LENGTH // 2]] * len(part), pa.list_(pa.int32())),
            "document_ids": pa.array([[f"{row:031x}a", f"{row:031x}b"] for row in part], pa.list_(pa.string())),
            "document_offsets": pa.array([[0, 0]] * len(part), pa.list_(pa.int64()))}
        infos.append(write_shard(folder_store, pa.table([columns[name].cast(schema.field(name).type)
                                                  for name in schema.names], schema=schema)))
    stamp = folder_store.write("tokenizer.json", b"{}")
    tokenizer = {"file": "tokenizer.json", "hash": stamp.hash, "eos": 0, "pad": 1}
    write_manifest(folder_store, Manifest(LENGTH, "uint16", VOCABULARY, tokenizer, "test", (), 2 * ROWS, tuple(infos)))
    return folder_store.uri


def settings(shards: str, folder: Any, run_id: str, **changes: Any) -> TrainConfig:
    return TrainConfig.model_validate({
        "run": {"uri": str(folder), "id": run_id}, "data": {"uri": shards, "seed": 3}, "steps": 120,
        "model": {"dim": 64, "num_layers": 1, "num_heads": 4, "tie_embeddings": True},
        "batch": {"global_sequences": 16, "micro_sequences": 8, "virtual_ranks": 2},
        "schedule": {"warmup_steps": 5}, "evaluation": {"sample_tokens": 0},
        "checkpoint": {"every_steps": SAVE_EVERY, "memory_tier": {"every_steps": 1}},
        "elastic": {"min_workers": 1, "max_workers": 2, "join_wait_seconds": 0.5, "resize_interval_seconds": 1},
        **changes})


def events(config: TrainConfig, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in jsonlog.read(store(config.run_uri), "events.jsonl") if event["kind"] in kinds]


STEP_SECONDS, LATE_STEP_SECONDS = 0.1, 3.0


def unhurried(steps: int, hurry: Path) -> Any:
    """Return a worker whose steps are slow, and very slow in the last third, until the file `hurry` exists.

    So the run cannot end before the test does, even on a slow machine.
    """
    def worker(settings: dict[str, Any]) -> Any:
        from tidewheel.elastic.worker import run_worker
        from tidewheel.train.loop import Loop

        if not hasattr(Loop, "at_once"):
            Loop.at_once = Loop._enqueue  # type: ignore[attr-defined]

        def slow_step(self: Any, step: int, *arguments: Any) -> Any:
            until = time.monotonic() + (LATE_STEP_SECONDS if 3 * step > 2 * steps else STEP_SECONDS)
            while not hurry.exists() and time.monotonic() < until:
                time.sleep(0.02)
            return self.at_once(step, *arguments)

        Loop._enqueue = slow_step  # type: ignore[method-assign]
        return run_worker(settings)

    return worker


class At:
    """Calls each action once, in its own thread, when the run reaches its step.

    The first action waits for both workers: on a busy machine, a run starts with one and grows.
    """

    def __init__(self, *plan: tuple[int, Any]) -> None:
        self.plan, self.times, self.threads = list(plan), [], []

    def __call__(self, progress: dict[str, Any]) -> None:
        if not self.times and progress.get("world_size") != 2:
            return
        while self.plan and progress.get("step", 0) >= self.plan[0][0]:
            _, action = self.plan.pop(0)
            self.times.append(time.time())
            self.threads.append(threading.Thread(target=action))
            self.threads[-1].start()

    def join(self) -> None:
        for thread in self.threads:
            thread.join(timeout=600)


def test_a_node_is_killed_one_joins_and_one_is_drained(cluster, shards, tmp_path, record_property):
    config, hurry = settings(shards, tmp_path, "elastic", reproducible=True), tmp_path / "hurry"
    victims = list[NodeHandle]()

    def drain() -> None:
        victims.append(cluster.nodes[-1])
        drain_node(cluster.address, victims[0].node_id, notice_seconds=60)

    disturb = At((15, lambda: cluster.kill_node(cluster.nodes[-1])), (20, cluster.add_node))
    leave = At((20, drain))

    def on_progress(progress: dict[str, Any]) -> None:
        disturb(progress)
        if not disturb.plan and events(config, "node_joined") and progress.get("world_size") == 2:
            leave(progress)
        if leave.times and progress.get("world_size") == 1:
            hurry.touch()

    result = run_workers(config, unhurried(config.steps, hurry), on_progress)
    disturb.join()
    leave.join()
    cluster.kill_node(victims[0])

    assert result.steps == config.steps
    audited = audit(config.run_uri)
    assert audited.ok, audited.summary()
    assert audited.world_sizes[-4:] == (2, 1, 2, 1)
    assert audited.redone <= 1  # the step in progress; planned changes repeat nothing

    before = [event for event in events(config, "start", "resume") if event["time"] < disturb.times[0]]
    lost, grown, left = [event for event in events(config, "resume") if event["time"] > disturb.times[0]]
    assert [event["detail"]["world_size"] for event in (before[-1], lost, grown, left)] == [2, 1, 2, 1]
    assert [event["detail"]["redo"] for event in (grown, left)] == [0, 0]
    assert events(config, "node_lost")
    assert events(config, "node_joined")
    recovery = lost["time"] - disturb.times[0]
    record_property("kill_to_resume_seconds", recovery)  # 0.1-0.2 on two idle cores
    # the survivor formed the next generation itself; Ray Train restarted nothing
    assert lost["detail"]["generation"] == before[-1]["detail"]["generation"] + 1
    failures = [event for event in events(config, "failure") if event["time"] > disturb.times[0]]
    assert [event["detail"]["recovery"] for event in failures] == ["in_place"]

    still = settings(shards, tmp_path, "undisturbed", reproducible=True)
    reference = fit_local(still)
    assert (result.loss, result.tokens) == (reference.loss, reference.tokens)
    assert digest(config.run_uri).state == digest(still.run_uri).state

    summary = summarise(jsonlog.read(store(config.run_uri), "ledger.jsonl"),
                        jsonlog.read(store(config.run_uri), "events.jsonl"))
    assert sum(summary.parts.values()) == pytest.approx(summary.worker_seconds, abs=0.01)
    assert summary.parts["detection"] > 0
    assert summary.parts["restart"] > 0
    assert [one.workers for one in summary.generations][-4:] == [2, 1, 2, 1]

    lines = RunLogs(store(config.run_uri)).new(LineFilter())
    generations = {event["detail"]["generation"] for event in (before[-1], lost, grown, left)}
    joins = [line for line in lines if line.logger == "tidewheel.elastic.worker" and line.text.startswith("joins")]
    ranks = {generation: {line.rank for line in joins if line.generation == generation} for generation in generations}
    assert ranks == {event["detail"]["generation"]: set(range(event["detail"]["world_size"]))
                     for event in (before[-1], lost, grown, left)}
    assert {line.role for line in lines} == {"", "coordinator", "agent"}
    copies = Path(ray._private.worker._global_node.get_logs_dir_path()).glob("tidewheel-elastic-*.log")
    assert any("rank=1" in path.read_text() for path in copies)

    assert [event["detail"]["tier"] for event in (lost, grown)] == ["memory", "memory"]
    assert fit(config).steps == config.steps  # a finished run does nothing
    assert len(list_checkpoints(store(config.run_uri).child("checkpoints"))) <= config.checkpoint.keep_last


class Stopped:
    """Keeps worker processes of a node from starting until `release`, as a slow disk would.

    Each is stopped as soon as it exists.
    """

    def __init__(self, cluster: LocalCluster, node: NodeHandle) -> None:
        self.cluster, self.node = cluster, node
        self.pids: set[int] = set()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.over.wait(0.02):
            for pid in set(self.cluster.processes(self.node)) - {self.node.pid} - self.pids:
                with contextlib.suppress(OSError):
                    title = Path(f"/proc/{pid}/cmdline").read_text()
                    if "default_worker.py" in title or title.startswith("ray::"):
                        os.kill(pid, signal.SIGSTOP)
                        self.pids.add(pid)

    def release(self) -> None:
        self.over.set()
        self.thread.join()
        for pid in self.pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)
        self.pids.clear()


@pytest.mark.long  # `test_ray_workers.py` starts such a group without Ray
def test_training_begins_without_a_node_whose_worker_does_not_start(cluster, shards, tmp_path):
    """Training starts with the other worker, and this one joins later."""
    while len(cluster.nodes) < 2:
        cluster.add_node()
    config, hurry = settings(shards, tmp_path, "late"), tmp_path / "hurry"
    stopped, sizes = Stopped(cluster, cluster.nodes[-1]), list[int]()

    def on_progress(progress: dict[str, Any]) -> None:
        sizes.append(progress.get("world_size", 0))
        if progress.get("step", 0) >= 3 and not stopped.over.is_set():
            stopped.release()
        if sizes[-1] == 2:
            hurry.touch()

    try:
        assert run_workers(config, unhurried(config.steps, hurry), on_progress).steps == config.steps
    finally:
        stopped.release()
    audited = audit(config.run_uri)
    assert audited.ok, audited.summary()
    assert audited.world_sizes == (1, 2)
    assert audited.redone == 0
    assert not events(config, "failure")


@pytest.mark.long  # `test_left_out.py` has a worker that is left out, and a probe, without Ray
def test_a_worker_that_fails_is_left_out_and_a_new_one_of_its_node_is_probed_and_let_in(cluster, shards, tmp_path):
    """Its process ends and the other worker continues: one worker's error, even a fatal one, does not end the run."""
    while len(cluster.nodes) < 2:
        cluster.add_node()
    config, hurry, flag = settings(shards, tmp_path, "blamed"), tmp_path / "hurry", tmp_path / "fault"
    slow, victim, sizes = unhurried(config.steps, hurry), cluster.nodes[-1].node_id, list[int]()

    def worker(settings: dict[str, Any]) -> Any:
        from tidewheel.train import loop

        step, node = loop.start_step, ray.get_runtime_context().get_node_id()

        def failing(*arguments: Any, **named: Any) -> Any:
            if node == victim and flag.exists():
                flag.unlink()
                raise ValueError("this node only")
            return step(*arguments, **named)

        loop.start_step = failing
        return slow(settings)

    def on_progress(progress: dict[str, Any]) -> None:
        size = progress.get("world_size", 0)
        if not sizes and size == 2 and progress.get("step", 0) >= 5:
            flag.touch()
            sizes.append(size)
        elif sizes and size != sizes[-1]:
            sizes.append(size)
        if sizes == [2, 1, 2]:
            hurry.touch()

    assert run_workers(config, worker, on_progress).steps == config.steps
    audited = audit(config.run_uri)
    assert audited.ok, audited.summary()
    assert audited.world_sizes[-3:] == (2, 1, 2)
    [out] = events(config, "worker_left_out")
    assert (out["detail"]["node"], out["detail"]["level"]) == (victim, "process")
    assert out["detail"]["until"] == out["time"]  # after the first failure, the probe may readmit at once
    [failure] = events(config, "failure")
    assert failure["detail"]["error"] == out["detail"]["reason"] == "ValueError: this node only"
    assert [event["detail"]["node"] for event in events(config, "worker_readmitted")] == [victim]


@pytest.mark.long  # `test_ray_workers.py` and `test_left_out.py` leave such a worker out without Ray
def test_a_node_on_which_workers_cannot_start_is_excluded(cluster, shards, tmp_path):
    """A package may be missing there, for example. The other workers train the run."""
    while len(cluster.nodes) < 2:
        cluster.add_node()
    config, victim = settings(shards, tmp_path, "unfit"), cluster.nodes[-1].node_id
    hurry = tmp_path / "hurry"
    slow = unhurried(config.steps, hurry)

    def worker(settings: dict[str, Any]) -> Any:
        if ray.get_runtime_context().get_node_id() == victim:
            raise ModuleNotFoundError("No module named 'torch'")
        return slow(settings)

    def on_progress(progress: dict[str, Any]) -> None:
        if any(event["kind"] == "worker_left_out" for event in progress["events"]):
            hurry.touch()

    assert run_workers(config, worker, on_progress).steps == config.steps
    assert audit(config.run_uri).world_sizes == (1,)
    out = events(config, "worker_left_out")
    assert {event["detail"]["node"] for event in out} == {victim}
    assert "No module named" in out[0]["detail"]["reason"]


def trainers(cluster: LocalCluster) -> list[int]:
    """Return the process ids of the cluster's training workers."""
    pids = []
    for node in cluster.nodes:
        for pid in cluster.processes(node):
            with contextlib.suppress(OSError):
                if "RayTrainWorker" in Path(f"/proc/{pid}/cmdline").read_text():
                    pids.append(pid)
    return pids


@pytest.mark.long  # `test_in_place.py` has a frozen worker without Ray
def test_a_frozen_worker_is_replaced(cluster, shards, tmp_path, record_property):
    """SIGSTOP leaves it alive for Ray and silent for the coordinator, which cuts it off; the run continues."""
    while len(cluster.nodes) < 2:
        cluster.add_node()
    config, hurry = settings(shards, tmp_path, "still", steps=40), tmp_path / "hurry"
    stop = At((15, lambda: os.kill(max(trainers(cluster)), signal.SIGSTOP)))

    def on_progress(progress: dict[str, Any]) -> None:
        stop(progress)
        if any(event["kind"] == "failure" for event in progress["events"]):
            hurry.touch()

    result = run_workers(config, unhurried(config.steps, hurry), on_progress)
    stop.join()
    assert result.steps == 40
    audited = audit(config.run_uri)
    assert audited.ok, audited.summary()
    failure = next(event for event in events(config, "failure") if event["time"] > stop.times[0])
    assert "no sign of life" in failure["detail"]["error"]
    seconds = failure["time"] - stop.times[0]
    record_property("stop_to_failure_seconds", seconds)  # heartbeat_seconds, 3, on an idle machine


DRIVER = """
import sys, ray
from pathlib import Path
from tests.cluster.test_elastic import unhurried
from tidewheel.config import load
from tidewheel.elastic.trainer import run_workers
from tidewheel.train.config import TrainConfig
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
config = load(TrainConfig, sys.argv[2])
run_workers(config, unhurried(config.steps, Path(sys.argv[3])),
            lambda progress: print(progress.get("step", 0), flush=True))
"""


def test_the_driver_is_killed_and_started_again(cluster, shards, tmp_path):
    config = settings(shards, tmp_path, "driver")
    file = tmp_path / "train.yaml"
    file.write_text(json.dumps(config.canonical()))  # JSON is YAML
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "platform"), str(root)])}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, cluster.address, str(file), str(tmp_path / "hurry")],
                              stdout=subprocess.PIPE, text=True, env=environment)
    assert driver.stdout is not None
    for line in driver.stdout:
        if int(line) >= 12:
            driver.kill()
            break
    driver.wait(timeout=600)
    driver.stdout.close()
    assert fit(config).steps == config.steps
    audited = audit(config.run_uri)
    assert audited.ok, audited.summary()
    assert 0 < events(config, "resume")[-1]["detail"]["step"] < config.steps


def test_more_workers_than_cpus_is_refused_at_once(cluster, shards, tmp_path):
    config = settings(shards, tmp_path, "greedy", elastic={"min_workers": 4, "max_workers": 4},
                      batch={"global_sequences": 16, "micro_sequences": 4, "virtual_ranks": 4})
    with pytest.raises(ClusterError, match="do not fit"):
        fit(config)
    assert not list(tmp_path.glob("greedy/*"))


def test_a_workers_own_error_reaches_the_driver(cluster, tmp_path):
    config = settings(str(tmp_path / "nothing"), tmp_path, "missing")
    with pytest.raises(ShardError, match=r"manifest\.json"):
        fit(config)
    assert not (tmp_path / "missing").exists()  # nothing was started

    def damaged(settings: dict[str, Any]) -> None:
        raise ShardError("damaged on this node only", where="x.arrow", fix="none")

    with pytest.raises(ShardError, match="on this node only"):
        run_workers(config, damaged)
    assert len(events(config, "failure")) == 1  # not retried
