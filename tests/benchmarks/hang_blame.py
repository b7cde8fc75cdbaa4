"""Measure how often the rank that started a hang is named: precision and recall over injected faults.

    python -m tests.benchmarks.hang_blame [--cases 100] [--real 2] [--seed 0]

Most cases are simulated: clusters of 2 to 64 ranks with data-parallel and tensor-parallel groups, whose ranks run one
program of collectives until a fault stops it (`tests/hang_world.py`). `--real` runs each of five faults that many times
in four processes with gloo, with the watch that training has, of which one is stopped, sleeps, is slow, or takes
another way. The exit code is 1 when precision or recall is below 95 %, or someone is blamed for nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.hang_world import FAULTS, STOPS, Run, simulated
from tidewheel.console import print_table
from tidewheel.train.guards.hang_blame import blame

GOAL = 0.95
RANKS = 4
LIMIT_SECONDS = 4.0
REAL = ("hang", "stopped", "slow", "skipped", "other order")
WAIT_SECONDS = 150.0


class Tally:
    """Counts who was blamed, rightly or not."""

    def __init__(self) -> None:
        self.cases = self.right = self.wrong = self.missed = self.exact = 0

    def add(self, blamed: tuple[int, ...], culprits: tuple[int, ...]) -> None:
        """Count one case."""
        self.cases += 1
        self.exact += set(blamed) == set(culprits)
        self.right += len(set(blamed) & set(culprits))
        self.wrong += len(set(blamed) - set(culprits))
        self.missed += len(set(culprits) - set(blamed))

    @property
    def precision(self) -> float:
        """Share of the blamed ranks that are culprits; 1 if nobody was blamed."""
        return self.right / (self.right + self.wrong) if self.right + self.wrong else 1.0

    @property
    def recall(self) -> float:
        """Share of the culprits that were blamed; 1 if there are none."""
        return self.right / (self.right + self.missed) if self.right + self.missed else 1.0


def beats_only(run: Run, culprits: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """Return whom the beats alone blame, without records: marks and numbers of collectives."""
    from tidewheel.train.guards.hang import Beat, find

    before, after = {}, {}
    for rank in run.at:
        counts = {name: run.started[rank].get(name, 0) for name, ranks in run.cluster.members.items() if rank in ranks}
        before[rank] = Beat(1, run.marked[rank], 0, "", counts)
        after[rank] = before[rank] if kind == "stopped" and rank in culprits else before[rank]._replace(number=3)
    return find(before, after, 1.0).ranks


def simulate(cases: int, seed: int) -> tuple[list[dict[str, Any]], Tally, int]:
    """Return a row for each kind of fault, the sum over all faults, and how often someone was blamed for nothing."""
    rows = []
    whole, whole_before = Tally(), Tally()
    alarms = 0
    for kind in (*FAULTS, ""):
        tally, before = Tally(), Tally()
        for case in range(cases):
            run, culprits, records = simulated(kind, random.Random(f"{seed} {kind} {case}"))
            blamed = blame(records, run.cluster.members, run.cluster.kinds).ranks
            alarms += not kind and bool(blamed)
            for sums in (tally, whole) if kind else (tally,):
                sums.add(blamed, culprits)
            for sums in (before, whole_before) if kind else (before,):
                sums.add(beats_only(run, culprits, kind), culprits)
        rows.append(_row(kind or "no fault", tally, before))
    rows.append(_row("all faults", whole, whole_before))
    return rows, whole, alarms


def _row(name: str, tally: Tally, before: Tally | None = None) -> dict[str, Any]:
    row = {"fault": name, "cases": tally.cases, "named exactly": f"{100 * tally.exact / max(1, tally.cases):.1f} %",
           "precision": f"{100 * tally.precision:.1f} %", "recall": f"{100 * tally.recall:.1f} %"}
    if before is not None:
        row |= {"beats alone: precision": f"{100 * before.precision:.1f} %", "recall ": f"{100 * before.recall:.1f} %"}
    return row


def train(folder: str, kind: str, culprit: int) -> None:
    """Run steps of three collectives on one of `RANKS` ranks with a watch, and write what this rank found.

    All have one size: gloo ends a process that receives more bytes than it expects, so that nothing would hang.
    """
    import torch
    import torch.distributed as dist

    from tidewheel.train.guards.config import GuardsConfig
    from tidewheel.train.guards.hang import Watch

    rank = dist.get_rank()
    config = GuardsConfig(collective_timeout_seconds=LIMIT_SECONDS, start_timeout_seconds=60)
    watch = Watch(config, rank, RANKS)
    pairs = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
    watch.include([dist.distributed_c10d._get_default_group(), pairs])
    output = Path(folder)

    def add_up(group: Any = None) -> None:
        dist.all_reduce(torch.ones(8), group=group)

    try:
        for step in range(1, 12):
            wrong = step == 5 and rank == culprit
            watch.mark(step, "data")
            add_up()
            if wrong and kind in STOPS:
                output.joinpath("culprit").write_text(str(os.getpid()))
                if kind == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                until = time.monotonic() + WAIT_SECONDS
                while time.monotonic() < until:  # slow: it computes all the time
                    time.sleep(0.5) if kind == "hang" else torch.ones(300, 300) @ torch.ones(300, 300)
            watch.mark(step, "step")
            groups = [pairs, None] if not (wrong and kind == "other order") else [None, pairs]
            for group in groups:
                if not (wrong and kind == "skipped" and group is None):
                    add_up(group)
            watch.mark(step, "report")
            watch.started()
        time.sleep(WAIT_SECONDS)  # a rank that skipped something is done before the others
    except RuntimeError as error:
        explained = watch.explained(error)
        ranks = ",".join(map(str, getattr(explained, "ranks", ())))
        output.joinpath(f"rank{rank}").write_text(f"[{ranks}] {explained}")
    os._exit(0)  # the group cannot be used any more


def real(kind: str, culprit: int) -> tuple[tuple[int, ...], str]:
    """Run one fault in processes; return whom the first rank that noticed blamed, and its text."""
    import torch.multiprocessing as mp

    from tests.ranks import _rank

    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(_rank, (RANKS, f"file://{folder}/rendezvous", train, (folder, kind, culprit)),
                                     nprocs=RANKS, join=False, start_method="forkserver")
        until = time.monotonic() + WAIT_SECONDS
        said: list[Path] = []
        while not said and time.monotonic() < until:
            time.sleep(0.1)
            said = [path for path in Path(folder).glob("rank*") if path.stat().st_size]
        text = said[0].read_text() if said else ""
        for process in context.processes:
            process.kill()
            process.join()
    match = re.match(r"\[([\d,]*)\] (.*)", text, re.S)
    numbers = match[1] if match else ""
    return tuple(int(number) for number in numbers.split(",") if number), match[2] if match else "nobody noticed"


def main() -> int:
    """Run the cases, print the tables and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100, help="simulated cases of each fault")
    parser.add_argument("--real", type=int, default=2, help="cases of each fault in four processes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows, whole, alarms = simulate(options.cases, options.seed)
    print_table(rows, title="simulated clusters of 2 to 64 ranks")
    print(f"someone blamed for nothing: {alarms} of {options.cases}")
    seen = Tally()
    rng = random.Random(options.seed)
    real_rows = []
    for kind in REAL if options.real else ():
        tally = Tally()
        for _ in range(options.real):
            culprit = rng.randrange(RANKS)
            blamed, text = real(kind, culprit)
            print(f"{kind}, rank {culprit}: blamed {list(blamed)}: {text}", flush=True)
            tally.add(blamed, (culprit,))
            seen.add(blamed, (culprit,))
        real_rows.append(_row(kind, tally))
    if real_rows:
        print_table([*real_rows, _row("all faults", seen)], title=f"{RANKS} processes with gloo")
    bounds = [whole.precision, whole.recall, *((seen.precision, seen.recall) if seen.cases else ())]
    return int(min(bounds) < GOAL or alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
