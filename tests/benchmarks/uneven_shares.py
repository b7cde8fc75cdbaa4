"""Measure how much faster a run is if a worker at half speed computes fewer virtual ranks.

    python -m tests.benchmarks.uneven_shares [--steps 20] [--virtual-ranks 12] [--sequences 4] [--stopped 0.5]

Two workers train a Llama of 3 million parameters in reproducible mode with ZeRO-1. The second one's process is stopped
for a share of the time (SIGSTOP and SIGCONT, every 20 ms), so that half of its speed is left by default. They train
once with equal shares, once with `elastic.share_by_speed_every_steps: 5`, and once with equal shares and nobody
stopped. A fourth run has one process alone.

Times are medians of the last half of the steps. `passes` are the forward and backward passes of the slower worker,
`rest` is all else in a step: the exchange of gradients, the update, data, records. With V virtual ranks and a worker at
half speed, equal shares take V / 2 virtual ranks at half speed, the best shares V / 3: 1.5 times as fast, if nothing
but passes took time. The rest does, and no share makes it shorter. So the command prints two bounds: that of the
measured passes alone, and the same with the rest that the two workers have when nobody is stopped.

The exit code is 1 if the runs have other parameters, or if the speed is below 1.5 times that of equal shares and below
95 % of the second bound.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.unit.train.helpers import FileCheckpoints, Script, write_shards
from tidewheel import jsonlog, storage
from tidewheel.config import build
from tidewheel.console import print_table
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.pass_time import PassTime
from tidewheel.train.runtime import Runtime

LENGTH, EVERY = 256, 5
GOAL, NEAR = 1.5, 0.95
"""Goal for the speed, and the share of the bound that must be reached if the bound is below the goal."""
PERIOD = 0.02
"""Seconds from one stop of the slow worker to the next."""
SMALL: dict[str, Any] = {"dim": 192, "num_layers": 6, "num_heads": 3, "num_kv_heads": 3, "ffn_dim": 512,
                         "tie_embeddings": True}


def settings(folder: Path, run: str, steps: int, virtual_ranks: int, sequences: int, every: int) -> TrainConfig:
    """Return a run whose virtual ranks have one micro-batch of `sequences` each."""
    return build(TrainConfig, {
        "run": {"id": run, "uri": str(folder / "runs")}, "steps": steps, "reproducible": True, "model": SMALL,
        "data": {"uri": str(folder / "shards"), "seed": 7},
        "batch": {"global_sequences": sequences * virtual_ranks, "micro_sequences": sequences,
                  "virtual_ranks": virtual_ranks},
        "parallel": {"data": "zero1"}, "checkpoint": {"every_steps": steps}, "evaluation": {"sample_tokens": 0},
        "metrics": {"trackers": [], "every_steps": 1},
        "elastic": {"max_workers": 2, "share_by_speed_every_steps": every}})


def slow_down(process: int, stopped: float) -> subprocess.Popen[bytes]:
    """Stop a process for a share of the time, until the one that is returned is killed."""
    program = ("import os, signal, sys, time\n"
               "pid, stopped, running = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])\n"
               "while True:\n"
               "    os.kill(pid, signal.SIGSTOP)\n    time.sleep(stopped)\n"
               "    os.kill(pid, signal.SIGCONT)\n    time.sleep(running)\n")
    times = [str(stopped * PERIOD), str((1 - stopped) * PERIOD)]
    return subprocess.Popen([sys.executable, "-c", program, str(process), *times])


class TimedPasses:
    """Seconds of this process's passes in each step, which `PassTime` brackets."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seconds: list[float] = []
        begin, end = PassTime.begin, PassTime.end

        def begins(passes: PassTime) -> None:
            begin(passes)
            self._began = time.perf_counter()

        def ends(passes: PassTime, micro_batches: int) -> None:
            self.seconds.append(time.perf_counter() - self._began)
            end(passes, micro_batches)

        patch.setattr(PassTime, "begin", begins)
        patch.setattr(PassTime, "end", ends)


def worker(folder: Path, run: str, stopped: float, *arguments: int) -> None:
    """Train on this rank and write how long its passes took; the second one is slow."""
    rank = dist.get_rank()
    runtime = Runtime(rank, 2, checkpoints=FileCheckpoints(folder / f"{run}.npz"), control=Script())
    slow = slow_down(os.getpid(), stopped) if rank == 1 and stopped else None
    try:
        with pytest.MonkeyPatch.context() as patch:
            passes = TimedPasses(patch)
            train(settings(folder, run, *arguments), runtime)
        (folder / f"{run}-{rank}.json").write_text(json.dumps(passes.seconds))
    finally:
        if slow is not None:
            slow.kill()
            slow.wait()
            os.kill(os.getpid(), signal.SIGCONT)


def seconds_of(folder: Path, run: str) -> tuple[float, float]:
    """Return the median seconds of a step and of the slower worker's passes, of the last half of a run's steps."""
    lines = [line for line in jsonlog.read(storage.store(folder / "runs" / run), "metrics.jsonl") if "loss" in line]
    whole = [line["step_seconds"] for line in lines]
    ranks = [json.loads(file.read_text()) for file in sorted(folder.glob(f"{run}-[01].json"))]
    passes = [max(steps) for steps in zip(*ranks, strict=True)]
    return (statistics.median(whole[len(whole) // 2:]),
            statistics.median(passes[len(passes) // 2:]) if passes else 0.0)


def digest(file: Path) -> str:
    """Return the SHA-256 of the tensors of a checkpoint."""
    found = hashlib.sha256()
    with np.load(file) as saved:
        for name in sorted(set(saved.files) - {"extra"}):
            found.update(name.encode() + saved[name].tobytes())
    return found.hexdigest()


def measure(folder: Path, steps: int, virtual_ranks: int, sequences: int, stopped: float) -> list[dict[str, Any]]:
    """Train the four runs and return a row for each."""
    rows: list[dict[str, Any]] = []
    write_shards(folder / "shards", length=LENGTH, rows=400)
    for run, every, slowed in (("equal", 0, stopped), ("by speed", EVERY, stopped), ("equal, nobody stopped", 0, 0.0),
                               ("one process", 0, None)):
        began = time.monotonic()
        name = run.replace(" ", "-").replace(",", "")
        arguments = (steps, virtual_ranks, sequences, every)
        if slowed is not None:
            on_ranks(2, worker, folder, name, slowed, *arguments)
        else:
            checkpoints = FileCheckpoints(folder / f"{name}.npz")
            train(settings(folder, name, *arguments), Runtime(checkpoints=checkpoints))
        step, passes = seconds_of(folder, name)
        rows.append({"shares": run, "step, s": round(step, 3), "passes": round(passes, 3) if passes else "",
                     "rest": round(step - passes, 3) if passes else "",
                     "SHA-256": digest(folder / f"{name}.npz")[:16],
                     "whole run, s": round(time.monotonic() - began, 1)})
    return rows


def main() -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--virtual-ranks", type=int, default=12)
    parser.add_argument("--sequences", type=int, default=4, help=f"of {LENGTH} tokens, in the pass of a virtual rank")
    parser.add_argument("--stopped", type=float, default=0.5, help="share of the time in which the second is stopped")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="uneven-") as name:
        rows = measure(Path(name), options.steps, options.virtual_ranks, options.sequences, options.stopped)
    print_table(rows, title=f"two workers, the second stopped {options.stopped:.0%} of the time; "
                f"{options.sequences * LENGTH:,} tokens in a pass")
    equal, by_speed, unslowed, _ = rows
    faster = equal["step, s"] / by_speed["step, s"]
    passes, rest = equal["passes"] / by_speed["passes"], unslowed["rest"]
    bound = (equal["passes"] + rest) / (by_speed["passes"] + rest)
    same = len({row["SHA-256"] for row in rows}) == 1
    print(f"shares by speed: {faster:.2f} times as fast; the passes alone {passes:.2f}, with the {rest:.3f} s that the "
          f"rest takes when nobody is stopped {bound:.2f}; parameters {'the same' if same else 'differ'}")
    return int(not same or faster < min(GOAL, NEAR * bound))


if __name__ == "__main__":
    sys.exit(main())
