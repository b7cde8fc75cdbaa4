"""Groups of a DiLoCo run, each an elastic run on a local cluster of its own, under random events.

    python -m tests.chaos.groups --minutes 10 --seed 1 [--groups 2] [--nodes 2] [--reproducible] [--patience 4]
        [--set outer.quantise=int8] [--local]

Each group has its own events, those of `tests/chaos/events.py` and two more: the whole group is killed and starts again
15 to 30 s later, or all its processes stop for 10 s. A store that is away is away for one group. With `--local` each
group is one process without a cluster, which is killed, also during saves and right after a decision, or stopped.

By default no group runs out of patience, so all groups are in every round, whatever happens. With `--patience`, a group
waits only for so many seconds, and rounds are decided without groups that are late. The exit code is 1 unless

- every run finishes, with a clean audit and a complete ledger, as in `tests.chaos.training`;
- no decision changes; each outer gradient is what the round was decided with; each outer state follows from the one
  before and the outer gradients of the members, bit for bit (`tests/chaos/rounds.py`);
- no step of a group counts in two rounds, and the newest outer state is intact;
- the runs and the outer state have the SHA-256 of undisturbed groups in threads. With `--patience`, each run has the
  SHA-256 of a single process that takes the recorded outer states after the recorded steps, and each outer gradient of
  it has the bits that were sent (`tests/chaos/replay.py`). Without `--reproducible`, loss and parameters are near.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.chaos.events import EVENTS, REPLACED_SECONDS, later, replaced_if_gone, send, usual
from tests.chaos.local_world import kill_driver_around_a_round, kill_driver_during_save, local_run
from tests.chaos.replay import replay
from tests.chaos.rounds import Rounds, Witness
from tests.chaos.training import OTHER_WORK, PATIENCE, Chaos, EventRecord, consequences, disturb, examine
from tests.chaos.world import World, disturbed_run, prepare, settings
from tests.unit.outer.groups import train_together
from tidewheel.checkpoint.digest import digest
from tidewheel.console import print_table
from tidewheel.errors import ClusterError, TidewheelError
from tidewheel.train.config import TrainConfig

EVERY, KEEP = 10, 8
LONG = 36_000.0
"""Patience that no event outlasts, in seconds."""
STOPPED_SECONDS = 10.0
SHARED_MACHINE = ("elastic.start_timeout_seconds=600", "elastic.max_failures_without_progress=-1")
"""Settings of groups whose clusters share the processors of one machine: workers start slowly, and a group that waits
for another one makes no progress meanwhile, however often a slow collective breaks off."""


def kill_group(world: World, rng: random.Random) -> str:
    """Kill the driver and all workers, and start the group again later."""
    seconds = rng.uniform(15, 30)
    world.held.set()
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until and not world.over.is_set():
            world.kill_driver(with_workers=True)  # one may just have started
            for pid in world.trainers():
                send(pid, signal.SIGKILL)
            time.sleep(0.5)
    finally:
        world.held.clear()
    return f"started again after {seconds:.0f} s"


def stop_group(world: World, rng: random.Random) -> str:
    """Stop all processes of all nodes and the driver, which then go on as if nothing had been.

    Ray gives some nodes up meanwhile, in whose places new ones come.
    """
    nodes = world.cluster.nodes
    pids: list[int] = []
    for node in nodes:
        with contextlib.suppress(ClusterError):  # an earlier event has just removed it
            pids += world.cluster.processes(node)
    if (driver := world.driver_pid) is not None:
        pids.append(driver)
    for pid in pids:
        send(pid, signal.SIGSTOP)
    time.sleep(STOPPED_SECONDS)
    for pid in pids:
        send(pid, signal.SIGCONT)
    later(REPLACED_SECONDS, lambda: [replaced_if_gone(world, node) for node in nodes])
    return f"{len(pids)} processes for {STOPPED_SECONDS:g} s"


LOCAL = {function.__name__: function for function in (kill_group, stop_group, kill_driver_during_save,
                                                      kill_driver_around_a_round)}
GROUP_EVENTS = {**EVENTS, **LOCAL}
OF_ONE_PROCESS = (*LOCAL, "kill_driver", "storage_away", "storage_silent", "second_driver")
"""Events that need no cluster."""


@dataclass(frozen=True)
class Outcome:
    """What became of the groups."""

    groups: tuple[Chaos, ...]
    problems: tuple[str, ...]
    rounds: int
    """Rounds that were decided."""
    complete: int
    """Rounds with all groups."""


def configs(folder: Path, name: str, groups: int, nodes: int, steps: int, more: tuple[str, ...],
            patience: float) -> list[TrainConfig]:
    """Return the configuration of each group, the runs "g0", "g1", ... of a folder of their own."""
    found = []
    for group in range(groups):
        outer = (f"outer={{groups: {groups}, group: {group}, every: {EVERY}, keep: {KEEP}, "
                 f"patience_seconds: {patience}, store: {folder / name / 'outer'}}}")
        found.append(settings(folder, f"g{group}", steps, workers=nodes, overrides=(
            outer, f"run.uri={folder / name}", *SHARED_MACHINE, *more)))
    return found


def disturbed(folder: Path, runs: list[TrainConfig], *, nodes: int, seconds: float, seed: int, kinds: list[str],
              gap: tuple[float, float], step_seconds: float, count: int,
              local: bool) -> tuple[list[World], list[list[EventRecord]]]:
    """Run all groups to the end under events, and return their worlds and events."""
    hurry = folder / "hurry"
    with contextlib.ExitStack() as stack:
        worlds = []
        for config in runs:
            own = folder / config.run.id
            own.mkdir(parents=True, exist_ok=True)
            started = (local_run(own, config, step_seconds=step_seconds, CHAOS_HURRY=str(hurry)) if local else
                       disturbed_run(own, config, nodes=nodes, step_seconds=step_seconds, CHAOS_HURRY=str(hurry)))
            worlds.append(stack.enter_context(started))
        usually = list(OF_ONE_PROCESS) if local else [*usual(runs[0]), "kill_group", "stop_group"]
        with ThreadPoolExecutor(len(worlds)) as pool:
            causing = [pool.submit(disturb, world, random.Random(f"{seed} {world.config.run.id}"),
                                   kinds or usually, seconds=seconds, gap=gap, count=count, table=GROUP_EVENTS)
                       for world in worlds]
            events = [future.result() for future in causing]
        hurry.touch()
        until = time.monotonic() + max(PATIENCE, 2 * seconds)
        for world in worlds:
            world.over.wait(timeout=max(0.0, until - time.monotonic()))
    return worlds, events


def examine_rounds(folder: Path, runs: list[TrainConfig], witness: Witness) -> list[Rounds]:
    """Compute the rounds of each fragment from the record."""
    found = []
    for config in runs[:1]:
        assert config.outer is not None
        parts = sorted(witness.record.glob("fragment_*")) or [witness.record]
        for part in parts:
            rounds = Rounds(part, config.outer)
            rounds.examine()
            found.append(rounds)
            try:
                newest = digest(str(witness.folder / part.relative_to(witness.record)))
                if newest.step != len(rounds.decisions) - 1:
                    rounds.problems.append(f"the newest outer state is that of round {newest.step}, but round "
                                           f"{len(rounds.decisions) - 1} is decided")
            except TidewheelError as error:
                rounds.problems.append(f"the newest outer state: {error}")
    found[0].problems += [f"decision {name} has changed" for name in sorted(witness.changed)]
    return found


def replayed(folder: Path, worlds: list[World], rounds: Rounds, undisturbed: list[TrainConfig]) -> None:
    """Train each group again with the record, and note what is wrong with what it took."""
    for group, (world, config) in enumerate(zip(worlds, undisturbed, strict=True)):
        gone = {(event["detail"]["step"], event["detail"]["round"]): int(event["detail"]["newest"])
                for event in world.events("outer_history_gone")}
        takes = rounds.takes(group, gone)
        rounds.examine_takes(group, takes, config.steps)
        compared = replay(config, rounds, takes)
        sent = sum(group in rounds.members(number) for number in range(len(rounds.decisions)))
        print(f"g{group}: {len(takes)} outer states taken, {len(gone)} of them newer than before a failure; {sent} "
              f"outer gradients, {compared} compared with the replay")


def outer_differences(runs: list[TrainConfig], undisturbed: list[TrainConfig]) -> list[str]:
    """Return how the outer states differ from those of the undisturbed groups."""
    problems, parts = [], []
    for configs_ in (runs, undisturbed):
        assert configs_[0].outer is not None
        store = Path(configs_[0].outer.store)
        parts.append(sorted(store.glob("fragment_*")) or [store])
    for ours, theirs in zip(*parts, strict=True):
        found, expected = digest(str(ours)).state, digest(str(theirs)).state
        print(f"SHA-256 of the outer state {found}, undisturbed {expected}")
        if found != expected:
            problems.append(f"the outer state {ours.name} has the digest {found}, undisturbed {expected}")
    return problems


def run(folder: Path, *, seconds: float, seed: int, groups: int = 2, nodes: int = 2, kinds: list[str] | None = None,
        gap: tuple[float, float] = (15, 40), steps: int = 0, step_seconds: float = 0.1, reproducible: bool = False,
        patience: float = 0.0, more: tuple[str, ...] = (), count: int = 0, local: bool = False) -> Outcome:
    """Run the groups and what they are compared with, print the tables, and return the outcome.

    Args:
        folder: for the runs.
        seconds: in which there are events.
        seed: of the events.
        groups: number of groups.
        nodes: of each group, with one CPU each.
        kinds: of events; None: all.
        gap: least and most seconds between two events of a group.
        steps: of each group; 0: they take about `seconds`.
        step_seconds: added to each step.
        reproducible: compare bits.
        patience: seconds that a group waits for the others; 0: as long as it takes.
        more: further settings.
        count: number of events of each group after which the steps take only their own work; 0: no limit.
        local: each group is one process without a cluster.
    """
    torch.set_num_threads(1)
    prepare(folder)
    steps = steps or round(0.6 * seconds / (step_seconds + OTHER_WORK))
    all_settings = (*(("reproducible=true",) if reproducible else ()), *more)
    runs = configs(folder, "disturbed", groups, nodes, steps, all_settings, patience or LONG)
    undisturbed = configs(folder, "undisturbed", groups, nodes, steps, all_settings, LONG)
    if not patience:
        train_together(undisturbed)
    assert runs[0].outer is not None
    outer = Path(runs[0].outer.store)
    began = time.time()
    with Witness(outer, folder / "record") as witness:
        worlds, events = disturbed(folder, runs, nodes=nodes, seconds=seconds, seed=seed, kinds=kinds or [], gap=gap,
                                   step_seconds=step_seconds, count=count, local=local)
    for world, caused in zip(worlds, events, strict=True):
        print_table(consequences(world, caused), title=f"seed {seed}, {world.config.run.id}: {len(caused)} events")
    fragments = examine_rounds(folder, runs, witness)
    if patience and all(world.finished for world in worlds):
        replayed(folder, worlds, fragments[0], undisturbed)
    outcomes = [examine(world, caused, time.time() - began, reference, clocked=not local)
                for world, caused, reference in zip(worlds, events, undisturbed, strict=True)]
    problems = [f"{world.config.run.id}: {problem}" for world, outcome in zip(worlds, outcomes, strict=True)
                for problem in outcome.problems]
    problems += [problem for rounds in fragments for problem in rounds.problems]
    if reproducible and not patience and all(world.finished for world in worlds):
        problems += outer_differences(runs, undisturbed)
    decided = sum(len(rounds.decisions) - 1 for rounds in fragments)
    complete = sum(len(rounds.members(number)) == groups for rounds in fragments
                   for number in range(1, len(rounds.decisions)))
    if not patience and complete != decided:
        problems.append(f"{decided - complete} of {decided} rounds were decided without a group")
    print(f"{decided} rounds, {complete} with all {groups} groups; {sum(rounds.committed for rounds in fragments)} "
          "outer states compared with what is computed from the record")
    print("\n".join(problems) or f"finished: {groups} groups, {steps} steps each, audits clean, ledgers complete, "
          "rounds as recorded, results as expected")
    return Outcome(tuple(outcomes), tuple(problems), decided, complete)


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=2, help="nodes of each group with one CPU each, and most workers")
    parser.add_argument("--events", default="", help="kinds of events, separated by commas: " + ", ".join(GROUP_EVENTS))
    parser.add_argument("--gap", type=float, nargs=2, default=(15.0, 40.0), metavar=("LEAST", "MOST"),
                        help="seconds between two events of a group")
    parser.add_argument("--steps", type=int, default=0, help="steps of each run; by default they take about --minutes")
    parser.add_argument("--step-seconds", type=float, default=0.1, help="seconds added to each step")
    parser.add_argument("--patience", type=float, default=0.0,
                        help="seconds that a group waits for the others in a round; 0: as long as it takes")
    parser.add_argument("--count", type=int, default=0, help="end after this number of events of each group")
    parser.add_argument("--reproducible", action="store_true")
    parser.add_argument("--local", action="store_true", help="each group is one process without a cluster")
    parser.add_argument("--set", action="append", default=[], help="a setting of all groups: outer.quantise=int8")
    parser.add_argument("--keep", default="", help="folder in which to keep the runs, for `tidewheel report`")
    arguments = parser.parse_args()
    if arguments.patience and any(setting.startswith("outer.fragments") for setting in arguments.set):
        parser.error("a run with fragments is compared with undisturbed groups: leave out --patience")
    folder = Path(arguments.keep or tempfile.mkdtemp(prefix="tidewheel-chaos-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        outcome = run(folder, seconds=60 * arguments.minutes, seed=arguments.seed, groups=arguments.groups,
                      nodes=arguments.nodes, kinds=[kind for kind in arguments.events.split(",") if kind],
                      gap=tuple(arguments.gap), steps=arguments.steps, step_seconds=arguments.step_seconds,
                      reproducible=arguments.reproducible, patience=arguments.patience, more=tuple(arguments.set),
                      count=arguments.count, local=arguments.local)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
