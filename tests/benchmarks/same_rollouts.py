"""Train GRPO with 1, 2 and 3 generators on 1, 2 and 4 workers, with and without kills: one SHA-256 for all of them.

    python -m tests.benchmarks.same_rollouts [--generators 1 2 3] [--workers 1 2 4] [--steps 12] [--look-ahead 1]
        [--set rollouts.epochs=2]

Each run trains the same base model on sums, on one cluster whose nodes have a CPU each. In a run with kills, a
generator and a training worker get SIGKILL at once after a third of the steps. The exit code is 1 unless the parameters
and the rollouts of every step have the same bits in all runs, which also are those of a process without Ray, and all
kills came in time.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch

from tests.chaos.reinforcement import waves
from tests.chaos.world import processes
from tests.sums import sums_run, train_base, write_sums
from tidewheel import jsonlog, storage
from tidewheel.checkpoint.digest import digest
from tidewheel.cluster.local import LocalCluster
from tidewheel.console import print_table
from tidewheel.elastic.trainer import fit, fit_local
from tidewheel.post.audit import audit_rollouts
from tidewheel.post.ledger import LOG
from tidewheel.storage import content_hash
from tidewheel.train.config import TrainConfig

BASE_STEPS, UNJUDGED = 60, 4
SPARE = 1
"""Nodes more than the largest run needs, on which its lost processes start again."""


def outcome(config: TrainConfig) -> dict[str, Any]:
    """Return hashes of the parameters and the rollouts of a run that is over, and whether its audit is clean."""
    proof = audit_rollouts(config.run_uri)
    assert proof is not None
    return {"SHA-256 of the parameters": digest(config.run_uri).groups["model"],
            "rollouts": content_hash("\n".join(waves(config)).encode()).removeprefix("blake3-")[:16],
            "audit": "clean" if proof.ok else proof.summary()}


def killer(cluster: LocalCluster, at: int, killed: list[int]) -> Callable[[dict[str, Any]], None]:
    """Return a listener that kills a generator and a worker once, when the run is at step `at`."""
    def on_progress(progress: dict[str, Any]) -> None:
        if progress.get("step", 0) >= at and not killed:
            for title in ("ray::Generator", "RayTrainWorker"):
                killed.append(min(processes(cluster, title)))
                os.kill(killed[-1], signal.SIGKILL)

    return on_progress


def main() -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generators", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--look-ahead", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], help="a setting of all runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the cluster's processes
    rows: list[dict[str, Any]] = []
    late = 0
    with tempfile.TemporaryDirectory(prefix="same-rollouts-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_sums(folder, unjudged=UNJUDGED)
        base = train_base(folder, BASE_STEPS)
        settings = (f"rollouts.look_ahead={options.look_ahead}", *options.set)
        alone = sums_run(folder, "alone", base, options.steps, *settings)
        fit_local(alone)
        rows.append({"generators": 1, "workers": "1, no Ray", "kills": "", "seconds": "", **outcome(alone)})
        with LocalCluster(nodes=max(options.generators) + max(options.workers) + SPARE, cpus_per_node=1) as cluster:
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            for generators in options.generators:
                for workers in options.workers:
                    for kills in (False, True):
                        began = time.monotonic()
                        config = sums_run(
                            folder, f"{generators}-{workers}-{int(kills)}", base, options.steps, *settings,
                            f"rollouts.generators.processes={generators}", f"elastic.max_workers={workers}",
                            f"elastic.min_workers={1 if kills else workers}")
                        killed: list[int] = []
                        fit(config, on_progress=killer(cluster, options.steps // 3, killed) if kills else None)
                        lost = [record for record in jsonlog.read(storage.store(config.run_uri), LOG)
                                if record["kind"] == "generator_lost"]
                        late += kills and not lost
                        sizes = sorted({line["world_size"] for line in jsonlog.read(
                            storage.store(config.run_uri), "metrics.jsonl") if "world_size" in line})
                        rows.append({"generators": generators, "workers": ", ".join(map(str, sizes)),
                                     "kills": "a generator and a worker" if kills else "",
                                     "seconds": f"{time.monotonic() - began:.0f}", **outcome(config)})
                        print_table(rows[-1:])
            ray.shutdown()
    print_table(rows, title=f"GRPO on sums, {options.steps} steps, in_order, look-ahead {options.look_ahead}")
    distinct = {(row["SHA-256 of the parameters"], row["rollouts"], row["audit"]) for row in rows}
    print(f"{len(rows)} runs, {len(distinct)} outcome(s)" + f"; {late} kills of generators came too late" * (late > 0))
    return int(len(distinct) != 1 or rows[0]["audit"] != "clean" or late > 0)


if __name__ == "__main__":
    sys.exit(main())
