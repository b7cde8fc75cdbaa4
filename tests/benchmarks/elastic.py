"""Measure the cost of each event for Tidewheel and for plain elastic Ray Train, with the same model, data and saves.

    python -m tests.benchmarks.elastic [--only EVENT ...] [--ours-only] [--step-seconds 0.1]

Events: worker (SIGKILL), node (SIGKILL), frozen (SIGSTOP to a node), drain (notice of 30 s), join (a new node), and for
Tidewheel only: standby (a worker dies while a standby worker runs on a third node), kept and plain (the fallbacks,
after SIGKILL to a node).
Real raylets run on this machine with one worker each. `seconds` is the longest time without a step after the event,
less a step; `redone` counts repeated steps. Ray Train's side is its TorchTrainer with ScalingConfig(num_workers=(1, 2))
around Tidewheel's training loop and asynchronous checkpoints, so that only the handling of the event differs. An event
takes up to two minutes. The exit code is 1 when Tidewheel misses a limit. The limits are for an idle machine. Other
programs' use of the CPU is measured before and after each event, and lengthens the limits in proportion.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray

from tests.chaos.world import prepare, settings
from tidewheel import jsonlog
from tidewheel.cluster.faults import drain_node
from tidewheel.cluster.local import LocalCluster, NodeHandle
from tidewheel.console import print_table
from tidewheel.elastic.trainer import run_workers
from tidewheel.storage import store
from tidewheel.train.config import TrainConfig

AT_STEP, SAVE_EVERY = 33, 20
LIMITS = {"worker": 1.5, "node": 3.0, "frozen": 5.0, "drain": 2.0, "join": 2.0, "standby": 2.0, "kept": 5.0}
"""Limits in seconds. At most one step may be repeated after a worker or node died, and none otherwise."""
WORK_SECONDS = 1.0
REDONE = {"worker": 1, "node": 1, "frozen": 1, "standby": 1, "kept": 1}
PEERS = ("worker", "node", "frozen", "drain", "join")
MOST_SECONDS = 240.0
MARK = "cost: "


@dataclass(frozen=True)
class Cost:
    """Cost of one event: seconds without a step, repeated steps, world sizes of the run."""

    seconds: float
    redone: int
    sizes: tuple[int, ...]


def paced(seconds: float, done: Path) -> None:
    """Make every step of this process take `seconds` longer until the file `done` exists."""
    from tidewheel.train import loop

    step = loop.start_step

    def slow_step(*arguments: Any, **named: Any) -> Any:
        time.sleep(0 if done.exists() else seconds)
        return step(*arguments, **named)

    loop.start_step = slow_step


def ours(config: TrainConfig, seconds: float, done: Path) -> None:
    """Train with Tidewheel."""
    def worker(given: dict[str, Any]) -> Any:
        from tests.benchmarks.elastic import paced
        from tidewheel.elastic.worker import run_worker

        paced(seconds, done)
        return run_worker(given)

    run_workers(config, worker)


def peer(config: TrainConfig, seconds: float, done: Path) -> None:
    """Train with plain Ray Train."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def worker(given: dict[str, Any]) -> None:
        import ray.train

        from tests.benchmarks.elastic import paced
        from tidewheel import jsonlog, storage
        from tidewheel.checkpoint.manager import CheckpointManager
        from tidewheel.train.config import TrainConfig
        from tidewheel.train.loop import train
        from tidewheel.train.runtime import NoControl, Runtime

        class Control(NoControl):
            def event(self, kind: str, **detail: Any) -> None:
                log.append({"time": time.time(), "kind": kind, "detail": detail})

        paced(seconds, done)
        config = TrainConfig.model_validate(given)
        run_store, context = storage.store(config.run_uri), ray.train.get_context()
        log = jsonlog.JsonLog(run_store, "events.jsonl")
        before = [event for event in jsonlog.read(run_store, "events.jsonl") if event["kind"] in ("start", "resume")]
        manager = CheckpointManager.of(run_store.child("checkpoints"), config.checkpoint, lambda kind, detail: None,
                                       generation=None)
        train(config, Runtime(rank=context.get_world_rank(), world_size=context.get_world_size(), checkpoints=manager,
                              control=Control(), generation=len(before)))

    trainer: Any = TorchTrainer(
        worker, train_loop_config=config.canonical(),
        scaling_config=ScalingConfig(num_workers=(1, 2), elastic_resize_monitor_interval_s=10,  # type: ignore[arg-type]
                                     resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name=config.run.id, storage_path=tempfile.mkdtemp(prefix="peer-"),
                             failure_config=FailureConfig(max_failures=-1)))
    trainer.fit()


def disturb(event: str, cluster: LocalCluster, config: TrainConfig) -> Callable[[], None]:
    """Return the action of an event, whose victim is the last rank that trains."""
    records = jsonlog.read(store(config.run_uri), "ledger.jsonl")
    last = max(records, key=lambda record: (record["generation"], record["rank"]))["node"]
    victim = next((node for node in cluster.nodes if node.node_id.startswith(last)), cluster.nodes[-1])
    if event in ("worker", "standby"):
        return lambda: os.kill(_worker_of(cluster, victim), signal.SIGKILL)
    if event in ("node", "kept", "plain"):
        return lambda: _ignored(cluster.kill_node(victim))
    if event == "frozen":
        return lambda: _freeze(cluster.processes(victim))
    if event == "drain":
        return lambda: _ignored(drain_node(cluster.address, victim.node_id, notice_seconds=30))
    return lambda: _ignored(cluster.add_node())


def _freeze(processes: list[int]) -> None:
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)


def _ignored(value: Any) -> None:
    del value


def _worker_of(cluster: LocalCluster, node: NodeHandle) -> int:
    for pid in cluster.processes(node):
        with contextlib.suppress(OSError):
            if "RayTrainWorker" in Path(f"/proc/{pid}/cmdline").read_text():
                return pid
    raise RuntimeError("no worker there")


def cost(event: str, side: Callable[[TrainConfig, float, Path], None], step_seconds: float) -> Cost:
    """Run once with the event at step `AT_STEP` and return its cost."""
    nodes = {"join": 1, "standby": 3}.get(event, 2)
    with tempfile.TemporaryDirectory(prefix="elastic-", ignore_cleanup_errors=True) as name, _cluster(nodes) as cluster:
        folder = Path(name)
        prepare(folder)
        done = folder / "done"
        more = [f"checkpoint.every_steps={SAVE_EVERY}"]
        if event in ("kept", "plain"):
            more.append(f"elastic.recovery={event}")
        if event == "standby":
            more.append("elastic.standby_workers=1")
        config = settings(folder, event, 2000, workers=2, overrides=tuple(more))
        failed: list[BaseException] = []

        def run() -> None:
            try:
                side(config, step_seconds, done)
            except BaseException as error:
                failed.append(error)

        training = threading.Thread(target=run, daemon=True)
        training.start()
        watch = _Steps(config, failed)
        watch.until(lambda: watch.step() >= AT_STEP)
        if event == "standby":
            time.sleep(10)  # the standby worker warms up
        action, generations, last = disturb(event, cluster, config), watch.generations(), watch.step()
        at = time.time()
        threading.Thread(target=action, daemon=True).start()
        watch.until(lambda: watch.generations() > generations)
        watch.until(lambda: watch.last_generation_steps() >= 3)
        measured = watch.cost(at, last, step_seconds)
        done.touch()
        return measured


class _Steps:
    """The steps that a run has recorded so far."""

    def __init__(self, config: TrainConfig, failed: list[BaseException]) -> None:
        self._store, self._failed = store(config.run_uri), failed

    def lines(self) -> list[dict[str, Any]]:
        return [line for line in jsonlog.read(self._store, "metrics.jsonl") if "world_size" in line]

    def step(self) -> int:
        return max((line["step"] for line in self.lines()), default=0)

    def sizes(self) -> tuple[int, ...]:
        sizes_seen: list[int] = []
        for line in self.lines():
            if not sizes_seen or sizes_seen[-1] != line["world_size"]:
                sizes_seen.append(line["world_size"])
        return tuple(sizes_seen)

    def generations(self) -> int:
        return len({line["generation"] for line in self.lines()})

    def last_generation_steps(self) -> int:
        lines = self.lines()
        return sum(line["generation"] == lines[-1]["generation"] for line in lines)

    def cost(self, at: float, last: int, step_seconds: float) -> Cost:
        times = [line["time"] for line in self.lines() if line["time"] > at - 5 * step_seconds - 1]
        gap = max(after - before for before, after in itertools.pairwise(times) if after > at)
        records = jsonlog.read(self._store, "batches.jsonl")
        redone = len(records) - len({record["step"] for record in records})
        return Cost(max(0.0, gap - step_seconds), redone, self.sizes())

    def until(self, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + MOST_SECONDS
        while not condition():
            if self._failed:
                raise self._failed[0]
            if time.monotonic() > limit:
                raise TimeoutError(f"no change for {MOST_SECONDS:g} s; so far {self.sizes()}, step {self.step()}")
            time.sleep(0.2)


@contextlib.contextmanager
def _cluster(nodes: int) -> Iterator[LocalCluster]:
    with LocalCluster(nodes=nodes, cpus_per_node=1) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            yield cluster
        finally:
            ray.shutdown()


def main() -> int:
    """Run the events, print the table and return the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", nargs="+", choices=[*LIMITS, "plain"], default=[*LIMITS, "plain"])
    arguments.add_argument("--ours-only", action="store_true")
    arguments.add_argument("--step-seconds", type=float, default=0.1)
    arguments.add_argument("--output", default="", help="also write our times as JSON, for tidewheel plan goodput")
    arguments.add_argument("--one", nargs=2, metavar=("EVENT", "SIDE"), help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.one:
        event, side = chosen.one
        measured_cost = cost(event, {"ours": ours, "peer": peer}[side], chosen.step_seconds)
        print(MARK + json.dumps(asdict(measured_cost)), flush=True)
        os._exit(0)  # the run has not finished
    rows: list[dict[str, Any]] = []
    missed: list[str] = []
    seconds: dict[str, float] = {}
    for event in chosen.only:
        theirs = _tried(event, "peer", chosen.step_seconds) if event in PEERS and not chosen.ours_only else None
        before = crowding()
        tried = _tried(event, "ours", chosen.step_seconds)
        crowded = max(before, crowding())
        limit = LIMITS[event] * crowded if event in LIMITS else None
        late = not _within(event, tried, crowded)
        missed += [event] * late
        if isinstance(tried, Cost):
            seconds[event] = tried.seconds
        rows.append({"event": event, **_cells("Ray Train", theirs), **_cells("Tidewheel", tried),
                     "limit, s": f"{limit:.1f}" if limit else "", "": "missed" if late else ""})
        print_table(rows[-1:])
    print_table(rows, title="What events cost")
    if chosen.output:
        Path(chosen.output).write_text(json.dumps({"kind": "elastic", "seconds": seconds}))
    return 1 if missed else 0


def crowding() -> float:
    """Return the factor by which work takes longer here than on an idle machine."""
    began, until = time.monotonic(), time.thread_time() + WORK_SECONDS
    while time.thread_time() < until:
        pass
    return max(1.0, (time.monotonic() - began) / WORK_SECONDS)


def _within(event: str, outcome: Cost | str, crowded: float) -> bool:
    if isinstance(outcome, str):
        return False
    if event not in LIMITS:
        return True
    return outcome.seconds <= LIMITS[event] * crowded and outcome.redone <= REDONE.get(event, 0)


def _tried(event: str, side: str, seconds: float) -> Cost | str:
    """Measure an event in its own process, since Ray connects only once in a process."""
    command = [sys.executable, "-m", "tests.benchmarks.elastic", "--one", event, side, "--step-seconds", str(seconds)]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": _path()})
    marked = [line for line in run.stdout.splitlines() if line.startswith(MARK)]
    if marked:
        values = json.loads(marked[-1].removeprefix(MARK))
        return Cost(values["seconds"], values["redone"], tuple(values["sizes"]))
    return (run.stderr.strip().splitlines() or ["nothing"])[-1][:60]


def _path() -> str:
    root = str(Path(__file__).parents[2])
    return os.pathsep.join(dict.fromkeys([root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))


def _cells(side: str, outcome: Cost | str | None) -> dict[str, str]:
    seconds, redone = "", ""
    if isinstance(outcome, Cost):
        seconds, redone = f"{outcome.seconds:.2f}", str(outcome.redone)
    elif outcome is not None:
        seconds = outcome
    return {f"{side}, s": seconds, f"{side}, redone": redone}


if __name__ == "__main__":
    sys.exit(main())
