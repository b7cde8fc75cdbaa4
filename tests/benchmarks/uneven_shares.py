"""Measure how much faster a run is if a worker at half speed computes fewer virtual ranks.

    python -m tests.benchmarks.uneven_shares [--steps 30] [--virtual-ranks 12] [--stopped 0.5]

Two workers train a Llama of 3 million parameters in reproducible mode with ZeRO-1. The second one's process is stopped
for a share of the time (SIGSTOP and SIGCONT, every 20 ms), so that half of its speed is left by default. It trains once
with equal shares and once with `elastic.share_by_speed_every_steps: 5`; a third run has one process alone.

`seconds` is the median of the last half of the steps. With V virtual ranks and a worker at half speed, equal shares
take V / 2 virtual ranks at half speed, the best shares V / 3: 1.5 times as fast, if nothing but passes took time. The
exit code is 1 if the runs have other parameters, or the speed is below 1.3 times that of equal shares.
"""

from __future__ import annotations

import argparse
import hashlib
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
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.unit.train.helpers import FileCheckpoints, Script, write_shards
from tidewheel import jsonlog, storage
from tidewheel.config import build
from tidewheel.console import print_table
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.runtime import Runtime

LENGTH, EVERY, LEAST = 256, 5, 1.3
PERIOD = 0.02
"""Seconds from one stop of the slow worker to the next."""
SMALL: dict[str, Any] = {"dim": 192, "num_layers": 6, "num_heads": 3, "num_kv_heads": 3, "ffn_dim": 512,
                         "tie_embeddings": True}


def settings(folder: Path, run: str, steps: int, virtual_ranks: int, every: int) -> TrainConfig:
    """Return a run whose virtual ranks have a micro-batch of one sequence each."""
    return build(TrainConfig, {
        "run": {"id": run, "uri": str(folder / "runs")}, "steps": steps, "reproducible": True, "model": SMALL,
        "data": {"uri": str(folder / "shards"), "seed": 7},
        "batch": {"global_sequences": virtual_ranks, "micro_sequences": 1, "virtual_ranks": virtual_ranks},
        "parallel": {"data": "zero1"}, "checkpoint": {"every_steps": steps}, "evaluation": {"sample_tokens": 0},
        "metrics": {"trackers": []},
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


def worker(folder: Path, run: str, stopped: float, *arguments: int) -> None:
    """Train on this rank; the second one is slow."""
    rank = dist.get_rank()
    runtime = Runtime(rank, 2, checkpoints=FileCheckpoints(folder / f"{run}.npz"), control=Script())
    slow = slow_down(os.getpid(), stopped) if rank == 1 else None
    try:
        train(settings(folder, run, *arguments), runtime)
    finally:
        if slow is not None:
            slow.kill()
            slow.wait()
            os.kill(os.getpid(), signal.SIGCONT)


def seconds_of(folder: Path, run: str) -> float:
    """Return the median seconds of the last half of a run's steps."""
    lines = jsonlog.read(storage.store(folder / "runs" / run), "metrics.jsonl")
    return statistics.median(line["step_seconds"] for line in lines[len(lines) // 2:])


def digest(file: Path) -> str:
    """Return the SHA-256 of the tensors of a checkpoint."""
    found = hashlib.sha256()
    with np.load(file) as saved:
        for name in sorted(set(saved.files) - {"extra"}):
            found.update(name.encode() + saved[name].tobytes())
    return found.hexdigest()


def main() -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--virtual-ranks", type=int, default=12)
    parser.add_argument("--stopped", type=float, default=0.5, help="share of the time in which the second is stopped")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="uneven-") as name:
        folder = Path(name)
        write_shards(folder / "shards", length=LENGTH, rows=200)
        for run, every, workers in (("equal", 0, 2), ("by speed", EVERY, 2), ("alone", 0, 1)):
            began = time.monotonic()
            arguments = (options.steps, options.virtual_ranks, every)
            if workers == 2:
                on_ranks(2, worker, folder, run.replace(" ", "-"), options.stopped, *arguments)
            else:
                train(settings(folder, run, *arguments), Runtime(checkpoints=FileCheckpoints(folder / f"{run}.npz")))
            file = run.replace(" ", "-")
            rows.append({"shares": run, "seconds of a step": round(seconds_of(folder, file), 3),
                         "SHA-256": digest(folder / f"{file}.npz")[:16],
                         "whole run, s": round(time.monotonic() - began, 1)})
    print_table(rows, title=f"two workers, the second stopped {options.stopped:.0%} of the time")
    faster = rows[0]["seconds of a step"] / rows[1]["seconds of a step"]
    same = len({row["SHA-256"] for row in rows}) == 1
    print(f"shares by speed: {faster:.2f} times as fast; parameters {'the same' if same else 'differ'}")
    return int(not same or faster < LEAST)


if __name__ == "__main__":
    sys.exit(main())
