"""What each event costs: Ray Train alone, elastic, beside Tidewheel; same model, same data, same interval of saves.

    python -m tests.benchmarks.elastic [--only EVENT ...] [--ours-only] [--step-seconds 0.1]

Events: worker (SIGKILL), node (SIGKILL), frozen (node, SIGSTOP), drain (notice of 30 s), join (a fresh node), and of
ours only: standby (a worker dies beside one that stands by, on a third node), kept and plain (the fallbacks, a node
SIGKILLed).
Real raylets on this machine, one worker each. `seconds` is the longest time without a step from the event on,
less a step; `redone` counts steps. Ray Train's side is its TorchTrainer with ScalingConfig(num_workers=(1, 2)) around
our training loop and our asynchronous checkpoints: what differs is only who deals with the event. It takes up to two
minutes an event. Exit code 1 when one of ours misses its limit. The limits are those of an idle machine; where other
programs take the CPU too, which is measured before and after each event, they are as many times longer.
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
"""Seconds, from the issue. Redone: at most one step of a worker or node that died, none otherwise."""
WORK_SECONDS = 1.0
REDONE = {"worker": 1, "node": 1, "frozen": 1, "standby": 1, "kept": 1}
PEERS = ("worker", "node", "frozen", "drain", "join")
MOST_SECONDS = 240.0
MARK = "cost: "


@dataclass(frozen=True)
class Cost:
    """Of one event: seconds without a step, steps done again, world sizes of the run."""

    seconds: float
    redone: int
    sizes: tuple[int, ...]


def paced(seconds: float, done: Path) -> None:
    """Make every step of this process take so much longer, until the file `done` is there."""
    from tidewheel.train import loop

    step = loop.train_step

    def slow_step(*arguments: Any, **named: Any) -> Any:
        time.sleep(0 if done.exists() else seconds)
        return step(*arguments, **named)

    loop.train_step = slow_step


def ours(config: TrainConfig, seconds: float, done: Path) -> None:
    """Tidewheel."""
    def worker(given: dict[str, Any]) -> Any:
        from tests.benchmarks.elastic import paced
        from tidewheel.elastic.worker import run_worker

        paced(seconds, done)
        return run_worker(given)

    run_workers(config, worker)


def peer(config: TrainConfig, seconds: float, done: Path) -> None:
    """Ray Train alone."""
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
        place, context = storage.store(config.run_uri), ray.train.get_context()
        log = jsonlog.JsonLog(place, "events.jsonl")
        before = [event for event in jsonlog.read(place, "events.jsonl") if event["kind"] in ("start", "resume")]
        manager = CheckpointManager.of(place.child("checkpoints"), config.checkpoint, lambda kind, detail: None,
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
    """What happens, to the last rank that trains."""
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
    """Run once, with the event at step `AT_STEP`."""
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
            time.sleep(10)  # it warms meanwhile
        action, generations, last = disturb(event, cluster, config), watch.generations(), watch.step()
        at = time.time()
        threading.Thread(target=action, daemon=True).start()
        watch.until(lambda: watch.generations() > generations)
        watch.until(lambda: watch.last_generation_steps() >= 3)
        found = watch.cost(at, last, step_seconds)
        done.touch()
        return found


class _Steps:
    """What a run has recorded so far."""

    def __init__(self, config: TrainConfig, failed: list[BaseException]) -> None:
        self._store, self._failed = store(config.run_uri), failed

    def lines(self) -> list[dict[str, Any]]:
        return [line for line in jsonlog.read(self._store, "metrics.jsonl") if "world_size" in line]

    def step(self) -> int:
        return max((line["step"] for line in self.lines()), default=0)

    def sizes(self) -> tuple[int, ...]:
        found: list[int] = []
        for line in self.lines():
            if not found or found[-1] != line["world_size"]:
                found.append(line["world_size"])
        return tuple(found)

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
                raise TimeoutError(f"nothing for {MOST_SECONDS:g} s; so far {self.sizes()}, step {self.step()}")
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
    """Print the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", nargs="+", choices=[*LIMITS, "plain"], default=[*LIMITS, "plain"])
    arguments.add_argument("--ours-only", action="store_true")
    arguments.add_argument("--step-seconds", type=float, default=0.1)
    arguments.add_argument("--one", nargs=2, metavar=("EVENT", "SIDE"), help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.one:
        event, side = chosen.one
        found = cost(event, {"ours": ours, "peer": peer}[side], chosen.step_seconds)
        print(MARK + json.dumps(asdict(found)), flush=True)
        os._exit(0)  # the run is left in the middle
    rows: list[dict[str, Any]] = []
    missed: list[str] = []
    for event in chosen.only:
        theirs = _tried(event, "peer", chosen.step_seconds) if event in PEERS and not chosen.ours_only else None
        before = crowding()
        mine = _tried(event, "ours", chosen.step_seconds)
        crowded = max(before, crowding())
        limit = LIMITS[event] * crowded if event in LIMITS else None
        late = not _within(event, mine, crowded)
        missed += [event] * late
        rows.append({"event": event, **_cells("Ray Train", theirs), **_cells("Tidewheel", mine),
                     "limit, s": f"{limit:.1f}" if limit else "", "": "missed" if late else ""})
        print_table(rows[-1:])
    print_table(rows, title="What events cost")
    return 1 if missed else 0


def crowding() -> float:
    """How many times longer a piece of work takes here than on an idle machine: 1 when nobody else computes."""
    began, until = time.monotonic(), time.thread_time() + WORK_SECONDS
    while time.thread_time() < until:
        pass
    return max(1.0, (time.monotonic() - began) / WORK_SECONDS)


def _within(event: str, found: Cost | str, crowded: float) -> bool:
    if isinstance(found, str):
        return False
    if event not in LIMITS:
        return True
    return found.seconds <= LIMITS[event] * crowded and found.redone <= REDONE.get(event, 0)


def _tried(event: str, side: str, seconds: float) -> Cost | str:
    """In a process of its own: Ray connects once in each."""
    command = [sys.executable, "-m", "tests.benchmarks.elastic", "--one", event, side, "--step-seconds", str(seconds)]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": _path()})
    found = [line for line in run.stdout.splitlines() if line.startswith(MARK)]
    if found:
        values = json.loads(found[-1].removeprefix(MARK))
        return Cost(values["seconds"], values["redone"], tuple(values["sizes"]))
    return (run.stderr.strip().splitlines() or ["nothing"])[-1][:60]


def _path() -> str:
    root = str(Path(__file__).parents[2])
    return os.pathsep.join(dict.fromkeys([root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))


def _cells(side: str, found: Cost | str | None) -> dict[str, str]:
    seconds, redone = "", ""
    if isinstance(found, Cost):
        seconds, redone = f"{found.seconds:.2f}", str(found.redone)
    elif found is not None:
        seconds = found
    return {f"{side}, s": seconds, f"{side}, redone": redone}


if __name__ == "__main__":
    sys.exit(main())
