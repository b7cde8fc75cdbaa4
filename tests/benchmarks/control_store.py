"""Kill Ray's control store (GCS) during a run and start it again; its tables are in a Redis server.

    python -m tests.benchmarks.control_store [--away 10] [--step-seconds 0.1]

Two workers train on a `LocalCluster` whose head has the settings of the Kubernetes component `redis`. The control
store is away for some seconds; a worker is killed meanwhile, and the other one must continue. The control store comes
back as a new process, and a new worker must join, which only works if Ray does. The exit code is 1 if the optimizer did
no steps meanwhile, if the driver ended, if another worker was lost, or if the run's weights differ from those of an
undisturbed run. `redis-server` must be installed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.control_store import REDIS_SERVER, ControlStore, redis_server
from tests.chaos.events import send
from tests.chaos.world import World, disturbed_run, prepare, settings
from tidewheel import jsonlog
from tidewheel.checkpoint.digest import digest
from tidewheel.console import print_table
from tidewheel.elastic.trainer import fit_local
from tidewheel.train.audit import audit

STEPS = 600
LEAST_STEPS = 20
"""Steps that the optimizer must do while the control store is away."""
MOST_SECONDS = 300.0
NODES = "import ray, sys\nray.init(address=sys.argv[1], log_to_driver=False)\n" \
        "print(sum(node['Alive'] for node in ray.nodes()))"


@dataclass
class Outcome:
    """What happened."""

    away: float = 0.0
    """Seconds without a process at the control store's address."""
    steps: int = 0
    """Steps done in that time."""
    listens: float = 0.0
    """Seconds from the start of the new process until it listens."""
    answers: float = 0.0
    """Seconds from its start until a new driver has connected and been told of all nodes."""
    longest: float = 0.0
    """Longest time between two steps, from the kill until the worker was killed."""
    recovery: float = 0.0
    """Seconds from the worker's death until the next step, without a control store."""
    problems: list[str] = field(default_factory=list)


def steps_between(world: World, since: float, until: float) -> list[float]:
    """Return the times of the steps that rank 0 has recorded within a time."""
    lines = [line["time"] for line in jsonlog.read(world.run_store, "metrics.jsonl") if "loss" in line]
    return sorted(at for at in lines if since <= at <= until)


def alive_nodes(address: str) -> int:
    """Return the number of nodes of which a new driver is told."""
    told = subprocess.run([sys.executable, "-c", NODES, address], capture_output=True, text=True, timeout=MOST_SECONDS,
                          check=True)
    return int(told.stdout.split()[-1])


def disturb(world: World, away: float) -> Outcome:
    """Kill the control store for some seconds, and a worker meanwhile."""
    outcome = Outcome()
    assert world.wait_for(lambda: world.step >= 20, MOST_SECONDS), world.drivers[-1].error
    nodes = alive_nodes(world.cluster.address)
    control_store = ControlStore(world.cluster)
    try:
        killed = time.time()
        control_store.kill()

        def enough() -> bool:
            now = time.time()
            return now - killed >= away and len(steps_between(world, killed + 0.5, now)) >= LEAST_STEPS

        if not world.wait_for(enough, MOST_SECONDS):
            outcome.problems.append("training did not go on while the control store was away")
        died = time.time()
        times = steps_between(world, killed, died)
        outcome.steps = len(times)
        outcome.longest = max(after - before for before, after in itertools.pairwise(times))
        send(sorted(world.trainers())[0], signal.SIGKILL)
        if not world.wait_for(lambda: bool(world.events("recovered")), MOST_SECONDS):
            outcome.problems.append("a worker's death was not recovered from without a control store")
        assert not control_store.listens()
        started = time.time()
        control_store.start()
        outcome.away = time.time() - killed
        outcome.listens = time.time() - started
        if alive_nodes(world.cluster.address) != nodes:
            outcome.problems.append("the control store came back without all nodes")
        outcome.answers = time.time() - started
        if not world.wait_for(lambda: len(world.events("recovered")) == 2 and world.world_size == 2, MOST_SECONDS):
            outcome.problems.append(f"no new worker: {world.events('failure', 'recovered', 'resize')}")
        if len(world.events("failure", "node_lost", "worker_left_out")) != 1:
            outcome.problems.append(f"it cost workers: {world.events('failure', 'node_lost', 'worker_left_out')}")
        (world.folder / "hurry").touch()
        if not world.over.wait(MOST_SECONDS):
            outcome.problems.append("the run did not end")
        pauses = [event["detail"]["seconds"] for event in world.events("recovered")]
        outcome.recovery = pauses[0] if pauses else 0.0
    finally:
        control_store.close()
    return outcome


def measure(folder: Path, away: float, step_seconds: float) -> Outcome:
    """Return what happened to a run whose control store was away for some seconds."""
    prepare(folder)
    undisturbed = settings(folder, "undisturbed", STEPS, workers=2, overrides=("reproducible=true",))
    fit_local(undisturbed)
    config = settings(folder, "run", STEPS, workers=2, overrides=("reproducible=true",))
    with redis_server(folder) as redis, disturbed_run(
            folder, config, nodes=2, step_seconds=step_seconds, CHAOS_HURRY=str(folder / "hurry"),
            **redis) as world:
        outcome = disturb(world, away)
        if [driver.code for driver in world.drivers] != [0]:
            outcome.problems.append(f"drivers ended: {[(driver.code, driver.error) for driver in world.drivers]}")
    audited = audit(config.run_uri)
    if not audited.ok:
        outcome.problems.append(audited.summary())
    if digest(config.run_uri).state != digest(undisturbed.run_uri).state:
        outcome.problems.append("the weights differ from those of an undisturbed run")
    return outcome


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--away", type=float, default=10.0, help="seconds without a control store, at least")
    options.add_argument("--step-seconds", type=float, default=0.1, help="seconds added to each step")
    options.add_argument("--json", default="", help="file for the outcome")
    given = options.parse_args()
    if REDIS_SERVER is None:
        print("redis-server is not installed: apt-get install redis-server, or name it in REDIS_SERVER")
        return 2
    with tempfile.TemporaryDirectory(prefix="tw-gcs-") as name:
        outcome = measure(Path(name), given.away, given.step_seconds)
    print_table([{"away, s": f"{outcome.away:.1f}", "steps meanwhile": outcome.steps,
                  "longest pause, s": f"{outcome.longest:.2f}",
                  "recovery from a death, s": f"{outcome.recovery:.2f}",
                  "listens after, s": f"{outcome.listens:.2f}",
                  "a new driver knows all nodes after, s": f"{outcome.answers:.1f}"}],
                title="the control store dies and comes back")
    if given.json:
        Path(given.json).write_text(json.dumps(vars(outcome)))
    print("\n".join(outcome.problems) or "training went on, and its weights have the bits of an undisturbed run")
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
