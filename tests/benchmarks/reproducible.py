"""Measure the cost of reproducible mode, and the deviation that it prevents.

    python -m tests.benchmarks.reproducible [--pairs 15] [--steps 50] [--only TEXT]

Cost: four gloo ranks hold the same model twice, once in each mode, and alternate fast and reproducible steps in pairs
of alternating order; the figure is the median of the pairs' ratios. The exit code is 1 when the first row, the default
layout, is more than 5 % slower, or a row with experts takes more than 30 % more CPU time, which other work on the
machine changes little.

Deviation: 1, 2 and 4 ranks train the debug model for `--steps` steps from the same values and data; the figures are the
largest differences of a step's loss and of a parameter between any two of them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.ranks import on_ranks
from tidewheel.config import build
from tidewheel.console import print_table
from tidewheel.models.decoder import next_tokens
from tidewheel.train import parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.build import build_optimizer
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import MicroBatch, StepResult, train_step

BOUND = 0.05
RANKS, VOCABULARY = 4, 2048
SMALL: dict[str, Any] = {"dim": 192, "num_layers": 6, "num_heads": 3, "num_kv_heads": 3, "ffn_dim": 512,
                         "tie_embeddings": True}
"""3.05 M parameters."""
COSTS: dict[str, dict[str, Any]] = {
    "zero2, once per step": {"parallel": {"data": "zero2"}},
    "zero2, 2 virtual ranks per worker": {"parallel": {"data": "zero2"}, "batch": {"virtual_ranks": 8}},
    "zero3, each of 2 micro-batches": {"parallel": {"data": "zero3", "reduce": "micro_batch"},
                                       "batch": {"virtual_ranks": 8}},
    "ddp": {"parallel": {"data": "ddp"}},
    "HSDP 2 x 2": {"parallel": {"data": "zero3", "replicate": 2}},
    **{f"{experts} experts on 4 ranks, {precision}": {
        "model": {"kind": "mixtral", "dim": 256, "num_layers": 2, "num_heads": 4, "ffn_dim": 256,
                  "num_experts": experts, "experts_per_token": 4},
        "precision": precision, "parallel": {"data": "zero2", "expert": 4}}
       for experts in (8, 64) for precision in ("fp32", "bf16")}}
"""With 64 experts and a micro-batch of 512 tokens, a product has 32 rows on average."""
EXPERTS_BOUND = 0.3


def micro_batch(config: TrainConfig, length: int, step: int, number: int) -> MicroBatch:
    """Return random walks over a part of the vocabulary, which a model can learn."""
    rows = config.batch.micro_sequences
    generator = torch.Generator().manual_seed(100_000 * step + number)
    tokens = torch.randint(0, 5, (rows, length), generator=generator).cumsum(dim=1) % 97
    segments = torch.zeros_like(tokens)
    targets = next_tokens(tokens, segments)
    return MicroBatch(tokens, torch.arange(length).expand(rows, -1), segments, targets, 0, tokens.numel(),
                      int((targets >= 0).sum()))


class Trainer:
    """A model under one configuration and its steps, used by all ranks together."""

    def __init__(self, config: TrainConfig, length: int, steps: int) -> None:
        ranks = dist.get_world_size()
        self.config, self.length, self.steps, runtime = config, length, steps, Runtime(dist.get_rank(), ranks)
        self.model: ParallelModel = parallel.build(config, VOCABULARY, runtime)
        parallel.init_weights(self.model, seed=1)
        self.optimizer, self.collectives = build_optimizer(self.model, config.optimizer), Collectives(runtime)

    def step(self, index: int) -> StepResult:
        """Do the step with index `index`, counted from 0."""
        config = self.config
        total = config.batch.global_sequences // config.batch.micro_sequences
        micros = [micro_batch(config, self.length, index, micro) for micro in self.model.share.of(total)]
        rate = config.schedule.learning_rate(index, self.steps, config.optimizer.learning_rate)
        self.optimizer.set_learning_rate(rate)
        return train_step(self.model, self.optimizer, micros, self.collectives, precision=config.precision,
                          virtual_ranks=config.batch.virtual_ranks, clip_norm=config.optimizer.clip_norm)


def settings(reproducible: bool, changes: dict[str, Any]) -> TrainConfig:
    """Return settings with micro-batches of two sequences, one for each virtual rank."""
    virtual = changes.get("batch", {}).get("virtual_ranks", RANKS)
    batch = {"global_sequences": 2 * virtual, "micro_sequences": 2, "virtual_ranks": virtual}
    values = {"model": SMALL, "elastic": {"max_workers": RANKS}, **changes, "batch": batch,
              "reproducible": reproducible}
    return build(TrainConfig, values)


def cost(changes: dict[str, Any], pairs: int, file: str) -> None:
    """Save each pair's fast and reproducible step in `file`: [pairs, 2], seconds and CPU seconds of all ranks."""
    modes = [Trainer(settings(reproducible, changes), 256, 2 * pairs) for reproducible in (False, True)]
    pair_seconds = []
    for pair in range(pairs + 2):
        seconds = [(0.0, 0.0), (0.0, 0.0)]
        for mode in ((0, 1), (1, 0))[pair % 2]:
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            modes[mode].step(pair)
            used = torch.tensor(time.process_time() - used)
            dist.barrier()
            took = time.perf_counter() - began
            dist.all_reduce(used)
            seconds[mode] = (took, float(used))
        pair_seconds.append(seconds)
    if dist.get_rank() == 0:
        np.save(file, np.array(pair_seconds[2:]))  # without the warm-up pairs


def deviation(reproducible: bool, changes: dict[str, Any], steps: int, file: str) -> None:
    """Train and save losses and parameters in `file`."""
    values = {"model": {"preset": "debug"}, "parallel": {"data": "zero2"}, "elastic": {"max_workers": RANKS},
              "batch": {"global_sequences": 16, "micro_sequences": 2, "virtual_ranks": RANKS},
              "schedule": {"warmup_steps": 5}, "reproducible": reproducible, **changes}
    trainer = Trainer(build(TrainConfig, values), 64, steps)
    losses = [trainer.step(step).loss for step in range(steps)]
    with torch.no_grad():
        whole = [parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                 for parameter in trainer.model.parameters()]
        parameters = torch.cat([value.flatten() for value in whole])
    if dist.get_rank() == 0:
        np.savez(file, losses=losses, parameters=parameters.numpy())


def costs(folder: Path, pairs: int, only: str) -> list[dict[str, Any]]:
    """Return a row for each layout."""
    lines = []
    for name, changes in COSTS.items():
        if only in name:
            file = str(folder / "cost.npy")
            on_ranks(RANKS, cost, changes, pairs, file)
            seconds = np.load(file)
            fast, ordered = np.median(seconds[:, :, 0], axis=0).tolist()
            ratio, cpu = (np.median(seconds[:, 1] / seconds[:, 0], axis=0) - 1).tolist()
            lines.append({"layout": name, "fast ms": round(1000 * fast, 1), "reproducible ms": round(1000 * ordered, 1),
                          "slower by": f"{ratio:+.1%}", "more CPU time": f"{cpu:+.1%}", "ratio": ratio, "cpu": cpu})
    return lines


def deviations(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Return a row for each precision and mode."""
    lines = []
    for precision in ("fp32", "bf16"):
        for reproducible in (False, True):
            files = [str(folder / f"{precision}-{reproducible}-{ranks}.npz") for ranks in (1, 2, RANKS)]
            for ranks, file in zip((1, 2, RANKS), files):
                on_ranks(ranks, deviation, reproducible, {"precision": precision}, steps, file)
            runs = [np.load(file) for file in files]

            def worst(name: str, runs: list[Any] = runs,
                      distance: Callable[[Any], Any] = lambda x: np.abs(x).max()) -> float:
                return float(max(distance(a[name] - b[name]) for a, b in combinations(runs, 2)))

            lines.append({"precision": precision, "mode": "reproducible" if reproducible else "fast",
                          "last loss": round(float(runs[0]["losses"][-1]), 4), "loss": f"{worst('losses'):.1e}",
                          "parameter": f"{worst('parameters'):.1e}"})
    return lines


def main() -> int:
    """Measure, print both tables and return the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pairs", type=int, default=15)
    arguments.add_argument("--steps", type=int, default=50, help="steps of the deviation runs; 0 for none")
    arguments.add_argument("--only", default="", help="layouts whose name contains this")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidewheel-reproducible-") as folder:
        rows = costs(Path(folder), chosen.pairs, chosen.only)
        if rows:
            print_table([{key: line[key] for key in line if key not in ("ratio", "cpu")} for line in rows],
                        title=f"{RANKS} workers, gloo: medians of {chosen.pairs} pairs of steps; 3.05 M parameters "
                              "without experts")
        if chosen.steps:
            print_table(deviations(Path(folder), chosen.steps),
                        title=f"largest differences between 1, 2 and {RANKS} workers after {chosen.steps} steps")
    too_slow = any(line["layout"] == next(iter(COSTS)) and line["ratio"] > BOUND for line in rows)
    return int(too_slow or any(line["cpu"] > EXPERTS_BOUND for line in rows if "experts" in line["layout"]))


if __name__ == "__main__":
    sys.exit(main())
