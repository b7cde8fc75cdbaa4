"""Measure how long GRPO on a cluster does no step after each event, and how many rollouts that costs.

    python -m tests.benchmarks.rollout_recovery [--rounds 3] [--trl] [--trl-only]

Two trainers and two generators run on four nodes of one CPU each. Each round stops a generator (SIGSTOP), kills one,
kills, drains and adds a node of a generator, and does the same with a trainer, which it does not stop. `seconds` is the
longest time without an optimizer step from the event until ten steps later, with as many processes as before where they
come back, less the median time between steps. Lost rollouts are prompts that no step has trained on or dropped by name.
The exit code is 1 if one is lost, or an event takes more than 1.5 s; other programs' use of the CPU lengthens the limit
in proportion. A generator that is stopped has a second line, the time until it is found, of which `STALL_SECONDS` are
allowed: the other generator makes its group meanwhile.

With --trl, TRL's GRPO on the same task is killed after step 17 and started again at once. It saves every ten steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.elastic import crowding
from tests.chaos.reinforcement import count
from tests.chaos.world import World, disturbed_run
from tests.sums import sums_run, train_base, write_sums
from tidewheel import jsonlog
from tidewheel.cluster.faults import drain_node
from tidewheel.console import print_table
from tidewheel.post.audit import audit_rollouts
from tidewheel.post.ledger import LOG

BASE_STEPS, FIRST_STEP, STEPS_AFTER = 60, 10, 10
LIMIT = 1.5
PATIENCE = 180.0
NOTICE_SECONDS = 5.0
STALL_SECONDS = 5.0
"""Setting of the run; the default is longer, for models with long passes."""
FOUND = "generator stopped: until it is found"
TRL_KILLED = 17
Processes = Callable[[], dict[int, Any]]


class Timeline:
    """The times of a run's steps."""

    def __init__(self, world: World) -> None:
        self._world = world

    def times(self) -> list[float]:
        """Return when each step was done, also repeated ones."""
        return [line["time"] for line in jsonlog.read(self._world.run_store, "metrics.jsonl") if "world_size" in line]

    def gap(self, since: float) -> float:
        """Return the longest time between two steps of which the second is after `since`, less the median time."""
        gaps = [(after - before, after) for before, after in itertools.pairwise(self.times())]
        return max(gap for gap, after in gaps if after > since) - statistics.median(gap for gap, _ in gaps)


def wait(world: World, what: str, condition: Callable[[], bool]) -> None:
    """Wait for a condition.

    Raises:
        TimeoutError: it does not come true.
    """
    if not world.wait_for(condition, PATIENCE):
        error = world.drivers[-1].error if world.drivers else ""
        raise TimeoutError(f"no {what} within {PATIENCE:g} s, at step {world.step}. {error}")


def measured(world: World, action: Callable[[], object], settled: Callable[[], bool]) -> float:
    """Return the longest time without a step from an action until the run has settled and done `STEPS_AFTER` steps."""
    timeline = Timeline(world)
    since = time.time()
    action()
    wait(world, "settled run", settled)
    done = len(timeline.times())
    wait(world, "step", lambda: len(timeline.times()) >= done + STEPS_AFTER)
    return timeline.gap(since)


def events(world: World, name: str, processes: Processes, rng: random.Random) -> Iterator[tuple[str, float]]:
    """Disturb the processes of one kind; yield each event and its seconds.

    Args:
        world: the cluster and the run.
        name: what the processes are.
        processes: the process ids, and their nodes.
        rng: chooses the victims.
    """
    def whole() -> bool:
        return len(processes()) == 2 and world.world_size == 2

    def alone() -> bool:
        return len(processes()) == 1 and (name != "trainer" or world.world_size == 1)

    def kill() -> None:
        victim = rng.choice(sorted(processes()))
        os.kill(victim, signal.SIGKILL)
        wait(world, "death", lambda: victim not in processes())

    def kill_node() -> None:
        world.cluster.kill_node(processes()[rng.choice(sorted(processes()))])

    def drain() -> None:
        node = processes()[rng.choice(sorted(processes()))]
        drain_node(world.cluster.address, node.node_id, notice_seconds=NOTICE_SECONDS)
        time.sleep(NOTICE_SECONDS)
        world.cluster.kill_node(node)

    def stop() -> None:
        victims.append(rng.choice(sorted(processes())))
        os.kill(victims[-1], signal.SIGSTOP)
        stopped.append(time.time())

    def losses() -> list[float]:
        return [line["time"] for line in jsonlog.read(world.run_store, LOG)
                if line["kind"] == "generator_lost" and "why" in line and line["time"] > stopped[-1]]

    victims: list[int] = []
    stopped: list[float] = []
    wait(world, f"second {name}", whole)
    if name == "generator":
        yield "generator stopped", measured(world, stop, lambda: bool(losses()))
        yield FOUND, losses()[0] - stopped[-1]
        wait(world, "new generator", lambda: victims[-1] not in processes() and whole())
    yield f"{name} killed, and replaced", measured(world, kill, whole)
    yield f"node of a {name} killed", measured(world, kill_node, alone)
    yield f"node joins, with a new {name}", measured(world, world.cluster.add_node, whole)
    yield f"node of a {name} drained", measured(world, drain, alone)
    yield f"node joins, with a new {name}", measured(world, world.cluster.add_node, whole)


def recovery(folder: Path, rounds: int) -> int:
    """Measure Tidewheel, print the table, and return the exit code."""
    base = train_base(folder, BASE_STEPS)
    config = sums_run(folder, "recovery", base, 20_000, "rollouts.look_ahead=1", "rollouts.generators.processes=2",
                      "elastic.max_workers=2", "checkpoint.every_steps=1000",
                      f"rollouts.generators.stall_seconds={STALL_SECONDS}")
    seconds: dict[str, list[float]] = {}
    rng = random.Random(0)
    before = crowding()
    with disturbed_run(folder, config, nodes=4, step_seconds=0.1, program="tests.chaos.rollout_driver") as world:
        wait(world, "step", lambda: world.step >= FIRST_STEP)
        for _ in range(rounds):
            for name, processes in (("generator", world.generators), ("trainer", world.trainers)):
                for event, took in events(world, name, processes, rng):
                    seconds.setdefault(event, []).append(took)
                    print(f"step {world.step}: {event}: {took:.2f} s", flush=True)
    limit = LIMIT * max(before, crowding())
    proof, counted = audit_rollouts(config.run_uri), count(config, set())
    assert proof is not None
    rows = [{"event": event, "times": len(took), "median, s": f"{statistics.median(took):.2f}",
             "longest, s": f"{max(took):.2f}",
             "": "missed" if statistics.median(took) > limit + STALL_SECONDS * (event == FOUND) else ""}
            for event, took in seconds.items()]
    print_table(rows, title=f"longest time without a step; limit {limit:.1f} s")
    lost = counted.skipped + counted.doubled + counted.failed_in_a_loss
    print(proof.summary())
    print(f"{counted.positions} prompts taken, {counted.skipped} skipped, {counted.doubled} doubled, "
          f"{counted.failed_in_a_loss} failed rollouts in a loss")
    return int(lost > 0 or not proof.ok or any(row[""] for row in rows))


def trl(folder: Path) -> None:
    """Kill TRL's GRPO, start it again, and print how long it did no step and what it repeated."""
    from tidewheel.checkpoint.conversion import export

    if not (folder / "exported").exists():
        export(train_base(folder, BASE_STEPS), str(folder / "exported"))
    steps = folder / "steps.jsonl"
    command = [sys.executable, "-m", "tests.benchmarks.trl_grpo", str(folder), str(steps)]

    def done() -> list[dict[str, Any]]:
        return [json.loads(line) for line in steps.read_text().splitlines()] if steps.exists() else []

    def until(condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > limit:
                raise TimeoutError("TRL does no step")
            time.sleep(0.02)

    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: bool(done()) and done()[-1]["step"] >= TRL_KILLED)
    first.kill()
    first.wait()
    at, before = time.time(), len(done())
    last = done()[-1]["step"]
    second = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: len(done()) > before)
    second.kill()
    second.wait()
    again = done()[before]
    print(f"TRL killed in step {last + 1}: {again['time'] - at:.1f} s to the next optimizer step, which is number "
          f"{again['step']}: {last - again['step'] + 1} steps and their rollouts are made again")


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trl", action="store_true")
    parser.add_argument("--trl-only", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    code = 0
    with tempfile.TemporaryDirectory(prefix="rollout-recovery-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_sums(folder)
        if not options.trl_only:
            code = recovery(folder, options.rounds)
        if options.trl or options.trl_only:
            trl(folder)
    return code


if __name__ == "__main__":
    sys.exit(main())
