"""A run on a local cluster of several nodes to which something happens all the time.

    python -m tests.chaos.training --minutes 20 --seed 1 [--reproducible] [--peer]

Every 20 to 60 s a random event of `tests/chaos/events.py`: real SIGKILLs, SIGSTOPs and drains of workers, nodes and the
driver, a store that is away or silent, a second driver, a damaged checkpoint. Exit code 1 unless

- the run finishes, and no driver ended but those that were killed;
- the audit finds every sequence as planned, each exactly once;
- the ledger's parts sum to the worker seconds, and its generations to the time that drivers were there, within 1 %;
- the loss and parameters are those of the undisturbed single process: to the bit with --reproducible.

With --peer plain Ray Train, elastic, then has the same events at the same times (`tests/chaos/peer.py`), for as long.

The table shows for each event the longest time without a step before the next event, and the steps done again.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.equivalence import weights
from tests.chaos import peer
from tests.chaos.events import EVENTS
from tests.chaos.world import World, disturbed_run, prepare, settings
from tidewheel import jsonlog
from tidewheel.console import print_table
from tidewheel.elastic.trainer import fit_local
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig
from tidewheel.train.time_ledger import LedgerSummary, summarise

LOSS_BOUND, PARAMETER_BOUND, WALL_BOUND = 2e-3, 2e-2, 0.01
FIRST_STEP = 5
"""Nothing happens before."""
OTHER_WORK = 0.06
"""Seconds a step of the model takes here beside what `--step-seconds` adds."""


@dataclass(frozen=True)
class Happened:
    """One event."""

    time: float
    step: int
    kind: str
    detail: str


@dataclass(frozen=True)
class Chaos:
    """What came of a disturbed run."""

    happened: tuple[Happened, ...]
    seconds: float
    goodput: float
    parts: dict[str, float]
    problems: tuple[str, ...]
    peer_steps: int = 0
    """Steps that count, of plain Ray Train in the same time; 0: not run."""


def disturb(world: World, rng: random.Random, kinds: list[str], *, seconds: float,
            gap: tuple[float, float]) -> list[Happened]:
    """Let events happen until the run is over or `seconds` have passed; each kind once before any comes again."""
    happened: list[Happened] = []
    world.wait_for(lambda: world.step >= FIRST_STEP, 120)
    until, deck = time.monotonic() + seconds, list[str]()
    while not world.over.is_set() and time.monotonic() < until:
        if not deck:
            deck = rng.sample(kinds, len(kinds))
        kind = deck.pop()
        world.wait_for(lambda: bool(world.cluster.nodes), 60)
        at, step = time.time(), world.step
        happened.append(Happened(at, step, kind, EVENTS[kind](world, rng)))
        print(f"{at - world.drivers[0].began:7.1f} s  step {step:<6} {kind}: {happened[-1].detail}", flush=True)
        world.over.wait(timeout=rng.uniform(*gap))
    return happened


def examine(world: World, happened: list[Happened], seconds: float, reference: TrainConfig) -> Chaos:
    """Compare the run with what was promised."""
    problems = []
    if not world.finished:
        problems.append(f"not finished: step {world.step} of {world.config.steps}")
    for driver in world.drivers:
        if driver.code != 0 and not driver.killed:
            problems.append(f"a driver ended by itself with code {driver.code}: {driver.error[-300:]}")
    found = audit(world.config.run_uri)
    if not found.ok or found.steps != world.config.steps:
        problems.append(f"audit: {found.summary()}")
    summary = summarise(jsonlog.read(world.place, "ledger.jsonl"), jsonlog.read(world.place, "events.jsonl"))
    problems += ledger_problems(summary, lived(world))
    problems += world.problems
    if world.finished:
        problems += differences(world.config, reference)
    return Chaos(tuple(happened), seconds, summary.goodput, summary.parts, tuple(problems))


def lived(world: World) -> float:
    """Seconds that drivers were there, by this process's clock: from their own start to their death or the finish.

    A driver that was killed before a worker of its own wrote anything is not counted, as the ledger cannot know it.
    """
    starts = [event["time"] for event in world.events("driver_start")]
    finishes = [event["time"] for event in world.events("finish")]
    ledger = [float(record["start"]) for record in jsonlog.read(world.place, "ledger.jsonl")]
    total = 0.0
    for driver in world.drivers:
        if not any(driver.began <= at <= driver.ended for at in ledger):
            continue
        begun = [at for at in starts if driver.began <= at <= driver.ended]
        ends = [at for at in finishes if driver.began <= at <= driver.ended]
        total += (ends or [driver.ended])[-1] - begun[0] if begun else 0.0
    return total


def ledger_problems(summary: LedgerSummary, wall: float) -> list[str]:
    """Whether every second is in one category, and none is missing."""
    problems = []
    if abs(sum(summary.parts.values()) - summary.worker_seconds) > 0.01:
        problems.append(f"ledger: parts {sum(summary.parts.values()):.2f} s, workers {summary.worker_seconds:.2f} s")
    if abs(summary.wall_seconds - wall) > WALL_BOUND * wall:
        problems.append(f"ledger: {summary.wall_seconds:.1f} s, drivers were there for {wall:.1f} s")
    return problems


def differences(config: TrainConfig, reference: TrainConfig) -> list[str]:
    """What the result has that the undisturbed one does not."""
    if getattr(config, "reproducible", False):
        from tidewheel.checkpoint.digest import digest

        ours, theirs = digest(config.run_uri).state, digest(reference.run_uri).state
        print(f"SHA-256 of the state {ours}, undisturbed {theirs}")
        return [] if ours == theirs else [f"the state's digest is {ours}, undisturbed {theirs}"]
    ours, theirs = final_loss(config), final_loss(reference)
    expected, found = weights(reference, reference), weights(config, reference)
    far = max(float((tensor - expected[name]).abs().max()) for name, tensor in found.items())
    print(f"loss {ours:.6f}, undisturbed {theirs:.6f}; parameters differ by at most {far:.1e}")
    return [f"loss {ours}, undisturbed {theirs}"] * (abs(ours - theirs) > LOSS_BOUND) + [
        f"a parameter is off by {far}"] * (far > PARAMETER_BOUND)


def beside_peer(folder: Path, happened: list[Happened], seconds: float, steps: int, *, nodes: int,
                step_seconds: float, seed: int) -> int:
    """Steps that count of plain Ray Train, in `seconds` from the first event on, which comes once it trains.

    Raises:
        RuntimeError: it does not train.
    """
    config = settings(folder, "peer", 10 * steps, workers=nodes)
    with disturbed_run(folder, config, nodes=nodes, step_seconds=step_seconds, program="tests.chaos.peer") as world:
        if not world.wait_for(lambda: _peer_step(world) >= FIRST_STEP, 180):
            raise RuntimeError(f"plain Ray Train has not begun: {world.drivers[-1].error}")
        start, rng, before = time.time(), random.Random(seed), _peer_step(world)
        for event in happened:
            time.sleep(max(0.0, start + event.time - happened[0].time - time.time()))
            kind = peer.AS_IF.get(event.kind, event.kind)
            if kind not in peer.LEFT_OUT and world.cluster.nodes:
                at, step = time.time() - start, _peer_step(world)
                print(f"plain Ray Train {at:7.1f} s  step {step:<6} {kind}: {EVENTS[kind](world, rng)}", flush=True)
        time.sleep(max(0.0, start + seconds - time.time()))
        return _peer_step(world) - before


def _peer_step(world: World) -> int:
    """The step it is at: those it does again count once."""
    lines = jsonlog.read(world.place, "metrics.jsonl")
    return int(lines[-1]["step"]) if lines else 0


def final_loss(config: TrainConfig) -> float:
    """Of the last step."""
    return float(json.loads(Path(config.run_uri, "result.json").read_text())["loss"])


def consequences(world: World, happened: list[Happened]) -> list[dict[str, Any]]:
    """A line for each event: the longest time without a step until the next event, and the steps done again."""
    lines = sorted((line for line in jsonlog.read(world.place, "metrics.jsonl") if "loss" in line),
                   key=lambda line: line["time"])
    table = []
    for number, event in enumerate(happened):
        until = happened[number + 1].time if number + 1 < len(happened) else float("inf")
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
        reproducible: bool = False, with_peer: bool = False) -> Chaos:
    """The disturbed run, its reference, and the table."""
    prepare(folder)
    steps = steps or round(0.6 * seconds / (step_seconds + OTHER_WORK))
    overrides = ("reproducible=true",) if reproducible else ()
    reference = settings(folder, "undisturbed", steps, workers=nodes, overrides=overrides)
    config = settings(folder, "disturbed", steps, workers=nodes, overrides=overrides)
    torch.set_num_threads(1)
    fit_local(reference)
    with disturbed_run(folder, config, nodes=nodes, step_seconds=step_seconds) as world:
        happened = disturb(world, random.Random(seed), kinds or list(EVENTS), seconds=seconds, gap=gap)
        world.over.wait(timeout=max(120.0, 2 * seconds))
        took = time.time() - world.drivers[0].began
    print_table(consequences(world, happened), title=f"seed {seed}: {len(happened)} events in {took:.0f} s")
    found = examine(world, happened, took, reference)
    whole = sum(found.parts.values())
    print(f"goodput {100 * found.goodput:.1f} % of {whole:.0f} worker seconds: " + ", ".join(
        f"{name.replace('_', ' ')} {100 * part / whole:.1f} %" for name, part in found.parts.items()))
    if with_peer:
        window = world.drivers[0].began + took - happened[0].time
        theirs = beside_peer(folder, happened, window, steps, nodes=nodes, step_seconds=step_seconds, seed=seed)
        found = replace(found, peer_steps=theirs)
        print(f"in {window:.0f} s from the first event on: {steps - happened[0].step} steps that count; plain Ray "
              f"Train under the same events {theirs}")
    print("\n".join(found.problems) or f"finished: {steps} steps, audit clean, ledger whole, result as undisturbed")
    return found


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=4, help="of one CPU each; 1 to 4 workers train")
    parser.add_argument("--events", default="", help="only these, comma between them: " + ", ".join(EVENTS))
    parser.add_argument("--gap", type=float, nargs=2, default=(20.0, 60.0), metavar=("LEAST", "MOST"),
                        help="seconds between events")
    parser.add_argument("--steps", type=int, default=0, help="of the run; by default it lasts about --minutes")
    parser.add_argument("--step-seconds", type=float, default=0.1, help="added to each step")
    parser.add_argument("--reproducible", action="store_true")
    parser.add_argument("--peer", action="store_true", help="then plain Ray Train, as long again")
    parser.add_argument("--keep", default="", help="folder for the runs, which stays; report it with tidewheel report")
    parser.add_argument("--json", default="", help="also write the outcome into this file")
    given = parser.parse_args()
    folder = Path(given.keep or tempfile.mkdtemp(prefix="tidewheel-chaos-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        found = run(folder, seconds=60 * given.minutes, seed=given.seed, nodes=given.nodes, gap=tuple(given.gap),
                    kinds=[kind for kind in given.events.split(",") if kind], steps=given.steps,
                    step_seconds=given.step_seconds, reproducible=given.reproducible, with_peer=given.peer)
    finally:
        if not given.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if given.json:
        Path(given.json).write_text(json.dumps(asdict(found), indent=1))
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
