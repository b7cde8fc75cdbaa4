"""Compare every layout with a single-process run: the losses and the parameters must be the same.

    python -m tests.benchmarks.equivalence [--steps 20] [--only TEXT] [--list]

Each row is a whole training run of the debug model in fp32 on CPU (gloo, up to 8 processes) from the same shards, with
the loop, the loader and the checkpoints of users. Its last checkpoint is then loaded into a single process. `loss` is
the largest relative difference of a step's loss and `parameter` the largest difference of an element from a single
process with the same recipe. `validation` is the relative difference of the final validation loss. In reproducible
mode all three must be 0. The exit code is 1 when a bound is exceeded. `--rounding` trains each recipe in a single
process with other micro-batches instead, which changes nothing but the rounding of sums.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.equivalence_rows import LENGTH, ROWS, SEQUENCES, Row
from tests.ranks import on_ranks
from tests.unit.train.helpers import write_shards
from tidewheel import jsonlog, storage
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.config import build
from tidewheel.console import print_table
from tidewheel.train import parallel
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.optim.build import build_optimizer, training_state
from tidewheel.train.record import read_result
from tidewheel.train.runtime import Runtime

LOSS_BOUND, PARAMETER_BOUND = 1e-5, 1e-4
AMPLIFIED = 3.0
ROUNDED = ("batch.micro_sequences=4",)
"""Micro-batches of 4 instead of 2 sequences, which change nothing but the rounding of sums."""
AT_ONCE = 6
"""Rows for each process: every row leaves process groups behind, whose threads slow down the next rows."""


def settings(folder: Path, name: str, steps: int, overrides: Sequence[str]) -> TrainConfig:
    """Return the configuration of a run: the common settings of the rows with `overrides`."""
    values: dict[str, Any] = {
        "run": {"id": name, "uri": str(folder / "runs")}, "steps": steps, "seed": 1,
        "data": {"uri": str(folder / "shards"), "validation": str(folder / "validation"), "seed": 7},
        "model": {"preset": "debug"}, "optimizer": {"learning_rate": 3e-3, "clip_norm": 0.5},
        "schedule": {"warmup_steps": 3}, "evaluation": {"sample_tokens": 0},
        "batch": {"global_sequences": SEQUENCES, "micro_sequences": 2, "virtual_ranks": 4},
        "checkpoint": {"every_steps": 0, "asynchronous": False}, "elastic": {"min_workers": 1, "max_workers": 8}}
    return build(TrainConfig, values, overrides)


def rounded(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each recipe, trained in a single process in micro-batches of 4 instead of 2 sequences."""
    by_recipe = {tuple(key for key in row.recipe if key != "reproducible=true"): row for row in rows}
    return [Row(f"Rounding, {row.name}", 1, ROUNDED, recipe) for recipe, row in by_recipe.items()]


def prepare(folder: Path) -> None:
    """Write the shards that all rows read."""
    write_shards(folder / "shards", rows=40, length=LENGTH)
    write_shards(folder / "validation", shards=1, rows=11, seed=1, length=LENGTH)


def checkpoints(config: TrainConfig) -> CheckpointManager:
    """Return a run's checkpoint manager, which saves synchronously."""
    return CheckpointManager(storage.store(config.run_uri).child("checkpoints"), asynchronous=False)


def train_all(configs: Sequence[TrainConfig]) -> None:
    """Train the configurations one after the other; called on every rank."""
    distributed = torch.distributed.is_initialized()
    rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if distributed else (0, 1)
    for config in configs:
        began = time.time()
        train(config, Runtime(rank, ranks, checkpoints=checkpoints(config)))
        if rank == 0:
            storage.store(config.run_uri).write_json("seconds.json", time.time() - began)


def run(folder: Path, rows: Sequence[Row], steps: int) -> list[dict[str, Any]]:
    """Train the rows and their references, and return a row of differences for each."""
    prepare(folder)
    references = {row.recipe: settings(folder, f"reference-{index}", steps, row.recipe)
                  for index, row in enumerate(rows)}
    train_all(list(references.values()))
    amplified = {row.recipe: settings(folder, f"rounded-{index}", steps, (*row.recipe, *ROUNDED))
                 for index, row in enumerate(rows) if row.amplifies}
    train_all(list(amplified.values()))
    allowed = {recipe: [AMPLIFIED * change for change in changes(config, references[recipe])]
               for recipe, config in amplified.items()}
    configs = {row.name: settings(folder, row.key, steps, (*row.recipe, *row.layout)) for row in rows}
    for ranks in sorted({row.ranks for row in rows}):
        rank_configs = [configs[row.name] for row in rows if row.ranks == ranks]
        for first in range(0, len(rank_configs), AT_ONCE):
            some = rank_configs[first:first + AT_ONCE]
            if ranks == 1:
                train_all(some)
            else:
                on_ranks(ranks, train_all, some)
    return [compare(row, configs[row.name], references[row.recipe], allowed.get(row.recipe, [0.0, 0.0, 0.0]))
            for row in rows]


def changes(config: TrainConfig, reference: TrainConfig) -> tuple[float, float, float]:
    """Return the largest differences from a reference: of a loss and the validation loss, relative; of a parameter."""
    ours, theirs = losses(config), losses(reference)
    assert ours.keys() == theirs.keys(), f"{config.run.id}: {len(ours)} steps, not {len(theirs)}"
    loss = max(abs(ours[step] - value) / abs(value) for step, value in theirs.items())
    expected = weights(reference, reference)
    parameter = max(float((value - expected[name]).abs().max()) for name, value in weights(config, reference).items())
    return loss, abs(validation_loss(config) / validation_loss(reference) - 1), parameter


def compare(row: Row, config: TrainConfig, reference: TrainConfig, allowed: Sequence[float]) -> dict[str, Any]:
    """Return a row's differences from its reference, and whether they are within the bounds or what is `allowed`."""
    loss, validation, parameter = changes(config, reference)
    bounds = [max(bound, more) for bound, more in zip((LOSS_BOUND, LOSS_BOUND, PARAMETER_BOUND), allowed, strict=True)]
    if row.exact:
        bounds = [0.0, 0.0, 0.0]
    seconds = storage.store(config.run_uri).read_json("seconds.json")
    return {"layout": row.name, "ranks": row.ranks, "loss": f"{loss:.1e}", "parameter": f"{parameter:.1e}",
            "validation": f"{validation:.1e}", "seconds": round(seconds, 1),
            "within": loss <= bounds[0] and validation <= bounds[1] and parameter <= bounds[2]}


def losses(config: TrainConfig) -> dict[int, float]:
    """Return the loss of each step."""
    lines = jsonlog.read(storage.store(config.run_uri), "metrics.jsonl")
    return {int(line["step"]): float(line["loss"]) for line in lines if "loss" in line}


def validation_loss(config: TrainConfig) -> float:
    """Return the validation loss of the finished run."""
    result = read_result(storage.store(config.run_uri))
    assert result is not None
    assert result.validation_loss is not None
    return result.validation_loss


def weights(config: TrainConfig, single: TrainConfig) -> dict[str, torch.Tensor]:
    """Load the last checkpoint of `config` in one process with the layout of `single`."""
    vocabulary = int(storage.store(config.run_uri).read_json("run.json")["vocabulary_size"])
    model = parallel.build(single, vocabulary, Runtime())
    state = training_state(model, build_optimizer(model, single.optimizer))
    assert checkpoints(config).load_latest(state) is not None
    return state["model"]


def main() -> int:
    """Run the rows and print the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--only", default="", help="rows whose name contains this")
    arguments.add_argument("--rounding", action="store_true", help="change only the rounding of sums, not the layout")
    arguments.add_argument("--list", action="store_true", help="print the names of the rows")
    chosen = arguments.parse_args()
    rows = [row for row in ROWS if chosen.only.lower() in row.name.lower()]
    if chosen.list:
        print("\n".join(row.name for row in rows))
        return 0
    if chosen.rounding:
        rows = rounded(rows)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tidewheel-equivalence-") as folder:
        table = run(Path(folder), rows, chosen.steps)
    print_table(table, title=f"{chosen.steps} steps beside the single process: losses within {LOSS_BOUND:g} relative, "
                             f"parameters within {PARAMETER_BOUND:g}")
    broken = [line["layout"] for line in table if not line["within"]]
    print(f"{len(table) - len(broken)} of {len(table)} within the bounds" + (f"; not: {broken}" if broken else ""))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
