"""GRPO on sums under random kills, on a local cluster of several nodes.

    python -m tests.chaos.reinforcement --kills 200 --seed 1 [--minutes M] [--nodes 4] [--keep FOLDER]

Two trainers and two generators run on nodes of one CPU each. Every few steps an event of `tests.chaos.rollout_events`
kills or stops generators, trainers, nodes or the driver, takes the store away, damages a checkpoint, drains or adds a
node. The next one comes when the run has trained on. After the last kill, or M minutes, the run goes on undisturbed to
its end. Some prompts have no usable reference, so their groups fail, and must be in no loss.

The exit code is 1 unless

- the run finishes, and only killed drivers ended early;
- no prompt is skipped, none is doubled, and no failed rollout is in a loss;
- the audits of the run and of its rollouts are clean;
- the rollouts of every step and the SHA-256 of the parameters equal those of an undisturbed process.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.chaos.rollout_events import ROLLOUT_EVENTS, open_until, usual_of_rollouts
from tests.chaos.training import EventRecord, consequences
from tests.chaos.world import World, disturbed_run
from tests.sums import sums_run, train_base, write_sums
from tidewheel import storage
from tidewheel.checkpoint.digest import digest
from tidewheel.console import print_table
from tidewheel.elastic.trainer import fit_local
from tidewheel.post import ledger
from tidewheel.post.audit import audit_rollouts
from tidewheel.post.prompts import read_prompts
from tidewheel.shards import growing
from tidewheel.shards.manifest import ROLLOUTS
from tidewheel.shards.rollouts import read_shard
from tidewheel.shards.tokenizer import of_manifest
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig

BASE_STEPS, UNJUDGED = 60, 4
STEPS_A_KILL, FIRST_STEP = 3, 4
PATIENCE = 300.0
"""Seconds that the run may take to train on after an event, however busy the machine is."""
AGAIN = 3
"""Kills of generators, which the others are about, come this many times as often as the other events."""


@dataclass(frozen=True)
class Count:
    """What became of the prompts, counted from the ledger and the shards of a run's rollouts."""

    positions: int
    """Of the order of the prompts, up to the last step."""
    skipped: int
    """Positions that no step admitted or dropped."""
    doubled: int
    """Positions that more than one step, or one step twice, admitted or dropped."""
    failed_in_a_loss: int
    """Groups that a step trains on, though their reward fails or the shard has another prompt's answers."""
    dropped: dict[str, int]
    """Groups dropped, by reason."""


def count(config: TrainConfig, unusable: set[str]) -> Count:
    """Count what became of the prompts of a run that is over.

    Args:
        config: of the run.
        unusable: ids of the prompts whose reward fails.
    """
    assert config.rollouts is not None
    folder = storage.store(config.run_uri).child(ROLLOUTS)
    manifest = growing.read_set(folder)
    prompts = read_prompts(config.rollouts.prompts, of_manifest(folder, manifest.tokenizer),
                           room=manifest.sequence_length - config.rollouts.answer_tokens, seed=config.rollouts.seed,
                           special_tokens=config.rollouts.special_tokens)
    times = Counter[int]()
    dropped = Counter[str]()
    failed = 0
    behind = 0
    for step, info in enumerate(manifest.shards, start=1):
        entry = ledger.read(folder, step, info.name)
        names = read_shard(folder, info, manifest).batch.column("prompt_id").to_pylist()
        groups = names[::config.rollouts.group]
        expected = [prompts.at(position).id for position in entry.admitted]
        failed += sum(name in unusable or name != other for name, other in zip(groups, expected, strict=True))
        times.update(entry.admitted)
        times.update(group.position for group in entry.dropped)
        dropped.update(entry.reasons())
        behind = max(behind, entry.next)
    return Count(behind, sum(times[position] == 0 for position in range(behind)),
                 sum(number > 1 for number in times.values()), failed, dict(dropped))


def waves(config: TrainConfig) -> list[str]:
    """Return the name of each step's shard, which is the hash of its rollouts."""
    return [shard.name for shard in growing.read_set(storage.store(config.run_uri).child(ROLLOUTS)).shards]


def deck(rng: random.Random, kinds: list[str]) -> list[str]:
    """Return a shuffled deck of events, in which those of generators come `AGAIN` times."""
    cards = [kind for kind in kinds for _ in range(AGAIN if kind in ("kill_generator", "kill_both") else 1)]
    return rng.sample(cards, len(cards))


def disturb(world: World, rng: random.Random, kinds: list[str], gate: Path, *, kills: int, seconds: float
            ) -> list[EventRecord]:
    """Cause events until there were `kills` or `seconds` are over, and return them.

    Args:
        world: the cluster and the run.
        rng: chooses the events.
        kinds: of the events.
        gate: see CHAOS_GATE in `tests.chaos.driver`: the run trains `STEPS_A_KILL` steps for each event.
        kills: number of events.
        seconds: of the whole.
    """
    events: list[EventRecord] = []
    world.wait_for(lambda: world.step >= FIRST_STEP, PATIENCE)
    began, cards, behind = time.time(), list[str](), FIRST_STEP
    while not world.over.is_set() and len(events) < kills and time.time() < began + seconds:
        behind += STEPS_A_KILL
        open_until(gate, behind)
        world.over.wait(timeout=rng.uniform(0.0, 1.0))
        cards = cards or deck(rng, kinds)
        kind = cards.pop()
        world.wait_for(lambda: bool(world.cluster.nodes), 60)
        at, step = time.time(), world.step
        events.append(EventRecord(at, step, kind, ROLLOUT_EVENTS[kind](world, rng)))
        print(f"{at - began:7.1f} s  {len(events):4}  step {step:<6} {kind}: {events[-1].detail}", flush=True)
        if not world.wait_for(lambda: world.has_done(behind), PATIENCE) and not world.over.is_set():  # noqa: B023
            world.problems.append(f"no step for {PATIENCE:g} s after {kind} at step {step}")
            break
    return events


def examine(world: World, alone: TrainConfig, unusable: set[str]) -> list[str]:
    """Print what the run promises, compare it with what it did, and return the differences."""
    config = world.config
    problems = list(world.problems)
    for driver in world.drivers:
        if driver.code != 0 and not driver.killed:
            problems.append(f"a driver ended by itself with code {driver.code}: {driver.error}")
    if not world.finished:
        return [*problems, f"not finished: step {world.step} of {config.steps}"]
    counted = count(config, unusable)
    for proof in (audit(config.run_uri), audit_rollouts(config.run_uri)):
        assert proof is not None
        print(proof.summary())
        problems += [] if proof.ok and proof.steps == config.steps else [f"audit: {proof.summary()}"]
    same = sum(ours == theirs for ours, theirs in zip(waves(config), waves(alone)))
    ours, theirs = digest(config.run_uri), digest(alone.run_uri)
    reasons = ", ".join(f"{number} {reason}" for reason, number in counted.dropped.items())
    rows = [{"": "prompts taken in order", "count": counted.positions}, {"": "skipped", "count": counted.skipped},
            {"": "doubled", "count": counted.doubled},
            {"": "failed rollouts in a loss", "count": counted.failed_in_a_loss},
            {"": "dropped by name", "count": reasons},
            {"": "steps whose rollouts have the undisturbed bits", "count": f"{same} of {config.steps}"},
            {"": "SHA-256 of the parameters", "count": ours.groups["model"]},
            {"": "undisturbed", "count": theirs.groups["model"]}]
    print_table(rows, title="what became of the prompts")
    problems += [f"{counted.skipped} prompts skipped"] * (counted.skipped > 0)
    problems += [f"{counted.doubled} prompts doubled"] * (counted.doubled > 0)
    problems += [f"{counted.failed_in_a_loss} failed rollouts in a loss"] * (counted.failed_in_a_loss > 0)
    problems += ["no group failed: the task tests nothing"] * (not counted.dropped)
    problems += [f"{config.steps - same} steps have other rollouts"] * (same < config.steps)
    problems += ["the state has other bits"] * (ours.state != theirs.state)
    return problems


def pauses(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each kind of event with its median and longest pause."""
    table = []
    for kind in sorted({row["event"] for row in rows}):
        seconds = sorted(float(row["pause"].removesuffix(" s")) for row in rows if row["event"] == kind)
        table.append({"event": kind, "times": len(seconds), "median pause, s": seconds[len(seconds) // 2],
                      "longest, s": seconds[-1],
                      "steps repeated": sum(row["redone"] for row in rows if row["event"] == kind)})
    return table


def run(folder: Path, *, kills: int, seed: int, seconds: float, nodes: int = 4, kinds: list[str] | None = None,
        more: tuple[str, ...] = ()) -> list[str]:
    """Run GRPO disturbed and undisturbed, print the tables, and return the problems.

    Args:
        folder: of both runs.
        kills: number of events.
        seed: of the events.
        seconds: after which there are no more events.
        nodes: of the cluster.
        kinds: of the events; all by default.
        more: settings of the run.
    """
    torch.set_num_threads(1)
    write_sums(folder, unjudged=UNJUDGED)
    base = train_base(folder, BASE_STEPS)
    steps = FIRST_STEP + STEPS_A_KILL * kills + 2
    settings = ("rollouts.look_ahead=1", "rollouts.generators.processes=2", *more)
    alone = sums_run(folder, "undisturbed", base, steps, *settings, "rollouts.generators.processes=1")
    began = time.time()
    fit_local(alone)
    print(f"undisturbed, in one process and a generator: {steps} steps in {time.time() - began:.0f} s", flush=True)
    config = sums_run(folder, "disturbed", base, steps, *settings, "elastic.max_workers=2",
                      "rollouts.generators.lease_seconds=10", "rollouts.generators.most_tries=20",
                      f"checkpoint.every_steps={STEPS_A_KILL}")
    gate, hurry = folder / "gate", folder / "hurry"
    hurry.unlink(missing_ok=True)
    open_until(gate, FIRST_STEP)
    with disturbed_run(folder, config, nodes=nodes, program="tests.chaos.rollout_driver", CHAOS_HURRY=str(hurry),
                       CHAOS_GATE=str(gate)) as world:
        began = time.time()
        events = disturb(world, random.Random(seed), kinds or usual_of_rollouts(config), gate, kills=kills,
                         seconds=seconds)
        took = time.time() - began
        hurry.touch()
        world.over.wait(timeout=PATIENCE + steps)
    table = consequences(world, events)
    print_table(pauses(table), title=f"seed {seed}: {len(events)} kills in {took:.0f} s")
    minutes = took / 60
    print(f"{len(events) / minutes:.1f} kills a minute; 200 take {200 * minutes / max(1, len(events)):.0f} minutes")
    unusable = {line["id"] for line in map(_parsed, (folder / "prompts.jsonl").read_text().splitlines())
                if not line["reference"].strip()}
    return examine(world, alone, unusable)


def _parsed(line: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(line)
    return values


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=120, help="no event begins after this time")
    parser.add_argument("--nodes", type=int, default=4, help="nodes with one CPU each")
    parser.add_argument("--events", default="", help="kinds of events, separated by commas: "
                        + ", ".join(ROLLOUT_EVENTS))
    parser.add_argument("--set", action="append", default=[], help="a setting of the run")
    parser.add_argument("--keep", default="", help="folder in which to keep the runs, for `tidewheel report`")
    arguments = parser.parse_args()
    kinds = [kind for kind in arguments.events.split(",") if kind]
    unknown = sorted(set(kinds) - set(ROLLOUT_EVENTS))
    if unknown:
        parser.error(f"--events: no event is named {unknown[0]}; there are {', '.join(ROLLOUT_EVENTS)}")
    folder = Path(arguments.keep or tempfile.mkdtemp(prefix="tidewheel-chaos-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        problems = run(folder, kills=arguments.kills, seed=arguments.seed, seconds=60 * arguments.minutes,
                       nodes=arguments.nodes, kinds=kinds, more=tuple(arguments.set))
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(problems) or "every promise was kept")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
