"""A training run on a local cluster of several nodes under random events.

    python -m tests.chaos.training --minutes 20 --seed 1 [--reproducible] [--peer]
    python -m tests.chaos.training --minutes 3 --reproducible --task dpo --count 5 --gap 10 15 --step-seconds 0.5 \
        --events kill_worker,kill_node,freeze_node,drain,join

Every 20 to 60 s there is a random event of `tests/chaos/events.py`: real SIGKILLs, SIGSTOPs and drains of workers,
nodes and the driver, an unavailable or silent store, a second driver, a damaged checkpoint. The exit code is 1 unless

- the run finishes, and only killed drivers ended early;
- the audit finds every planned sequence exactly once;
- the ledger's parts sum to the worker seconds, and its generations to the lifetime of the drivers, within 1 %;
- loss and parameters equal those of an undisturbed single process, bit for bit with --reproducible.

With --task, the run is QLoRA or DPO (`tests/chaos/fine_tuning.py`). With --count, it ends after that many events.

With --peer, plain elastic Ray Train (`tests/chaos/peer.py`) then runs as long, with the same events at the same times.

The table shows for each event the longest time without a step before the next event, and the repeated steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.equivalence import weights
from tests.chaos import peer
from tests.chaos.events import EVENTS, Event, usual
from tests.chaos.fine_tuning import TASKS, overrides
from tests.chaos.world import World, disturbed_run, settings
from tidewheel import jsonlog
from tidewheel.console import print_table
from tidewheel.elastic.trainer import fit_local
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig
from tidewheel.train.time_ledger import ENDINGS, LedgerSummary, summarise

LOSS_BOUND, PARAMETER_BOUND, WALL_BOUND = 2e-3, 2e-2, 0.01
FIRST_STEP = 5
"""Step before which there are no events."""
PATIENCE = 900.0
"""Seconds that a counted event waits for a step, however busy the machine is."""
OTHER_WORK = 0.06
"""Seconds that a step of the model takes on its own, to which `--step-seconds` is added."""


@dataclass(frozen=True)
class EventRecord:
    """An event: its time, the run's step, its kind and its description."""

    time: float
    step: int
    kind: str
    detail: str


@dataclass(frozen=True)
class Chaos:
    """The outcome of a disturbed run."""

    happened: tuple[EventRecord, ...]
    seconds: float
    goodput: float
    parts: dict[str, float]
    problems: tuple[str, ...]
    peer_steps: int = 0
    """Unrepeated steps of plain Ray Train in the same time; 0 if it did not run."""


def disturb(world: World, rng: random.Random, kinds: list[str], *, seconds: float, gap: tuple[float, float],
            count: int = 0, table: Mapping[str, Event] = EVENTS) -> list[EventRecord]:
    """Cause events until the run is over and, with a count of 0, `seconds` have passed, otherwise `count` events.

    No kind repeats before all have occurred. Of counted events, each waits until the run trains after the one before.

    Args:
        world: the cluster and the run.
        rng: chooses events and pauses.
        kinds: names of events.
        seconds: see above.
        gap: least and most seconds between two events.
        count: see above.
        table: all events by name.
    """
    events: list[EventRecord] = []
    world.wait_for(lambda: world.step >= FIRST_STEP, PATIENCE)
    until, deck = time.monotonic() + (seconds if not count else float("inf")), list[str]()
    while not world.over.is_set() and time.monotonic() < until and len(events) != (count or -1):
        if not deck:
            deck = rng.sample(kinds, len(kinds))
        kind = deck.pop()
        world.wait_for(lambda: bool(world.cluster.nodes), 60)
        if count:
            before = world.step
            world.wait_for(lambda: world.step > before and bool(world.trainers()), PATIENCE)  # noqa: B023
        at, step = time.time(), world.step
        events.append(EventRecord(at, step, kind, table[kind](world, rng)))
        print(f"{at - world.drivers[0].began:7.1f} s  {world.config.run.id} step {step:<6} {kind}: "
              f"{events[-1].detail}", flush=True)
        world.over.wait(timeout=rng.uniform(*gap))
    return events


def examine(world: World, events: list[EventRecord], seconds: float, reference: TrainConfig, *,
            clocked: bool = True) -> Chaos:
    """Compare the run with its promises.

    Args:
        world: the run.
        events: what happened to it.
        seconds: it took.
        reference: the undisturbed run.
        clocked: whether the ledger's generations must sum to the lifetime of the drivers.
    """
    problems = []
    if not world.finished:
        problems.append(f"not finished: step {world.step} of {world.config.steps}")
    for driver in world.drivers:
        if driver.code != 0 and not driver.killed:
            problems.append(f"a driver ended by itself with code {driver.code}: {driver.error[-300:]}")
    audited = audit(world.config.run_uri)
    if not audited.ok or audited.steps != world.config.steps:
        problems.append(f"audit: {audited.summary()}")
    summary = summarise(jsonlog.read(world.run_store, "ledger.jsonl"), jsonlog.read(world.run_store, "events.jsonl"))
    problems += ledger_problems(summary, driver_seconds(world) if clocked else summary.wall_seconds)
    problems += world.problems
    if world.finished:
        problems += differences(world.config, reference)
    return Chaos(tuple(events), seconds, summary.goodput, summary.parts, tuple(problems))


def driver_seconds(world: World) -> float:
    """Return the drivers' lifetimes in seconds by this process's clock, from start to death or finish.

    A driver that was killed before its workers wrote anything does not count, since the ledger cannot know it. One that
    was killed together with its workers counts up to their last record, or the end of their generation.
    """
    starts = [event["time"] for event in world.events("driver_start")]
    finishes = [event["time"] for event in world.events("finish")]
    endings = [event["time"] for event in world.events(*ENDINGS)]
    ledger = [(float(record["start"]), float(record["end"]))
              for record in jsonlog.read(world.run_store, "ledger.jsonl")]
    total = 0.0
    for driver in world.drivers:
        recorded = [end for start, end in ledger if driver.began <= start <= driver.ended]
        if not recorded:
            continue
        begun = [at for at in starts if driver.began <= at <= driver.ended]
        ends = [at for at in finishes if driver.began <= at <= driver.ended]
        if driver.with_workers:
            ends.append(max([*recorded, *(at for at in endings if driver.began <= at <= driver.ended)]))
        total += (ends or [driver.ended])[-1] - begun[0] if begun else 0.0
    return total


def ledger_problems(summary: LedgerSummary, wall: float) -> list[str]:
    """Return how the ledger's seconds deviate from the worker seconds and from the lifetimes of the drivers."""
    problems = []
    if abs(sum(summary.parts.values()) - summary.worker_seconds) > 0.01:
        problems.append(f"ledger: parts {sum(summary.parts.values()):.2f} s, workers {summary.worker_seconds:.2f} s")
    if abs(summary.wall_seconds - wall) > WALL_BOUND * wall:
        problems.append(f"ledger: {summary.wall_seconds:.1f} s, drivers lived for {wall:.1f} s")
    return problems


def differences(config: TrainConfig, reference: TrainConfig) -> list[str]:
    """Return how the result differs from the undisturbed one."""
    if getattr(config, "reproducible", False):
        from tidewheel.checkpoint.digest import digest

        ours, theirs = digest(config.run_uri).state, digest(reference.run_uri).state
        print(f"SHA-256 of the state {ours}, undisturbed {theirs}")
        return [] if ours == theirs else [f"the state's digest is {ours}, undisturbed {theirs}"]
    ours, theirs = final_loss(config), final_loss(reference)
    expected = weights(reference, reference)
    trained = weights(config, reference)
    deviation = max(float((tensor - expected[name]).abs().max()) for name, tensor in trained.items())
    print(f"loss {ours:.6f}, undisturbed {theirs:.6f}; parameters differ by at most {deviation:.1e}")
    return [f"loss {ours}, undisturbed {theirs}"] * (abs(ours - theirs) > LOSS_BOUND) + [
        f"a parameter is off by {deviation}"] * (deviation > PARAMETER_BOUND)


def steps_of_peer(folder: Path, events: list[EventRecord], seconds: float, steps: int, *, nodes: int,
                  step_seconds: float, seed: int) -> int:
    """Run plain Ray Train under the same events and return its unrepeated steps in `seconds` from the first event on.

    Raises:
        RuntimeError: plain Ray Train does not start to train.
    """
    config = settings(folder, "peer", 10 * steps, workers=nodes)
    with disturbed_run(folder, config, nodes=nodes, step_seconds=step_seconds, program="tests.chaos.peer") as world:
        if not world.wait_for(lambda: _peer_step(world) >= FIRST_STEP, 180):
            raise RuntimeError(f"plain Ray Train has not begun: {world.drivers[-1].error}")
        start, rng, before = time.time(), random.Random(seed), _peer_step(world)
        for event in events:
            time.sleep(max(0.0, start + event.time - events[0].time - time.time()))
            kind = peer.REPLACEMENTS.get(event.kind, event.kind)
            if kind not in peer.LEFT_OUT and world.cluster.nodes:
                at, step = time.time() - start, _peer_step(world)
                print(f"plain Ray Train {at:7.1f} s  step {step:<6} {kind}: {EVENTS[kind](world, rng)}", flush=True)
        time.sleep(max(0.0, start + seconds - time.time()))
        return _peer_step(world) - before


def _peer_step(world: World) -> int:
    """Return the current step of plain Ray Train, in which repeated steps count once."""
    lines = jsonlog.read(world.run_store, "metrics.jsonl")
    return int(lines[-1]["step"]) if lines else 0


def final_loss(config: TrainConfig) -> float:
    """Return the loss of the last step."""
    return float(json.loads(Path(config.run_uri, "result.json").read_text())["loss"])


def consequences(world: World, events: list[EventRecord]) -> list[dict[str, Any]]:
    """Return a row per event: the longest time without a step until the next event, and the repeated steps."""
    lines = sorted((line for line in jsonlog.read(world.run_store, "metrics.jsonl") if "loss" in line),
                   key=lambda line: line["time"])
    table = []
    for index, event in enumerate(events):
        until = events[index + 1].time if index + 1 < len(events) else float("inf")
        pause, redone, furthest = 0.0, 0, 0
        for before, after in itertools.pairwise(lines):
            furthest = max(furthest, before["step"])
            if event.time < after["time"] and before["time"] < until:
                pause = max(pause, min(after["time"], until) - max(before["time"], event.time))
                redone += after["step"] <= furthest
        table.append({"second": f"{event.time - world.drivers[0].began:.0f}", "event": event.kind,
                      "detail": event.detail[:70], "pause": f"{pause:.1f} s", "redone": redone})
    return table


def run(folder: Path, *, seconds: float, seed: int, nodes: int = 4, kinds: list[str] | None = None,
        gap: tuple[float, float] = (20, 60), steps: int = 0, step_seconds: float = 0.1,
        reproducible: bool = False, with_peer: bool = False, more: tuple[str, ...] = (), task: str = "pretraining",
        count: int = 0) -> Chaos:
    """Run the disturbed run and its reference, with the settings `more`, print the table, and return the outcome.

    After the last event the steps take no longer than their own work, so the run soon ends.
    """
    torch.set_num_threads(1)
    steps = steps or round(0.6 * seconds / (step_seconds + OTHER_WORK))
    all_settings = (*(("reproducible=true",) if reproducible else ()), *overrides(folder, task), *more)
    reference = settings(folder, "undisturbed", steps, workers=nodes, overrides=all_settings)
    config = settings(folder, "disturbed", steps, workers=nodes, overrides=all_settings)
    fit_local(reference)
    hurry = folder / "hurry"
    hurry.unlink(missing_ok=True)
    with disturbed_run(folder, config, nodes=nodes, step_seconds=step_seconds, CHAOS_HURRY=str(hurry),
                       CHAOS_FLIP=str(folder / "flip")) as world:
        events = disturb(world, random.Random(seed), kinds or usual(config), seconds=seconds, gap=gap, count=count)
        hurry.touch()
        world.over.wait(timeout=PATIENCE if count else max(120.0, 2 * seconds))
        took = time.time() - world.drivers[0].began
    print_table(consequences(world, events), title=f"seed {seed}: {len(events)} events in {took:.0f} s")
    outcome = examine(world, events, took, reference)
    whole = sum(outcome.parts.values())
    print(f"goodput {100 * outcome.goodput:.1f} % of {whole:.0f} worker seconds: " + ", ".join(
        f"{name.replace('_', ' ')} {100 * part / whole:.1f} %" for name, part in outcome.parts.items()))
    if with_peer:
        window = world.drivers[0].began + took - events[0].time
        theirs = steps_of_peer(folder, events, window, steps, nodes=nodes, step_seconds=step_seconds, seed=seed)
        outcome = replace(outcome, peer_steps=theirs)
        print(f"in {window:.0f} s from the first event on: {steps - events[0].step} unrepeated steps; plain Ray "
              f"Train under the same events {theirs}")
    print("\n".join(outcome.problems) or f"finished: {steps} steps, audit clean, ledger complete, undisturbed result")
    return outcome


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=4, help="number of nodes with one CPU each, and the most workers")
    parser.add_argument("--events", default="", help="kinds of events, separated by commas: " + ", ".join(EVENTS))
    parser.add_argument("--gap", type=float, nargs=2, default=(20.0, 60.0), metavar=("LEAST", "MOST"),
                        help="seconds between events")
    parser.add_argument("--steps", type=int, default=0, help="steps of the run; by default they take about --minutes")
    parser.add_argument("--step-seconds", type=float, default=0.1, help="seconds added to each step")
    parser.add_argument("--reproducible", action="store_true")
    parser.add_argument("--task", choices=TASKS, default=TASKS[0], help="what is trained")
    parser.add_argument("--count", type=int, default=0, help="end the run after this number of events; 0: no limit")
    parser.add_argument("--set", action="append", default=[], help="a setting of the run, such as adapter.kind=lora")
    parser.add_argument("--peer", action="store_true", help="run plain Ray Train afterwards, for as long")
    parser.add_argument("--keep", default="", help="folder in which to keep the runs, for `tidewheel report`")
    parser.add_argument("--json", default="", help="file for the outcome")
    arguments = parser.parse_args()
    if arguments.task != TASKS[0] and not arguments.reproducible:
        parser.error(f"--task {arguments.task} compares bits: add --reproducible")
    folder = Path(arguments.keep or tempfile.mkdtemp(prefix="tidewheel-chaos-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        outcome = run(folder, seconds=60 * arguments.minutes, seed=arguments.seed, nodes=arguments.nodes,
                      gap=tuple(arguments.gap), kinds=[kind for kind in arguments.events.split(",") if kind],
                      steps=arguments.steps, step_seconds=arguments.step_seconds,
                      reproducible=arguments.reproducible, with_peer=arguments.peer, more=tuple(arguments.set),
                      task=arguments.task, count=arguments.count)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(asdict(outcome), indent=1))
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
