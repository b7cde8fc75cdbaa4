"""Compare synchronous training with stale gradients: the loss at equal tokens, by how far gradients are behind.

    nice -n 10 python -m tests.benchmarks.staleness [--steps 200] [--seeds 3] [--output FOLDER]

The Llama of 128 x 2 layers of `tests.benchmarks.families` trains on ../shared/corpus with AdamW, and with `stale` of
contrib/optimizers, whose gradients are of older weights: constantly (PipeDream-2BW), drawn for each step (Hogwild), or
by the stage of a pipeline (PipeDream). `behind` is counted from the versions that the model held. A loss is that of the
newest weights. A run that is in the output folder is not trained again. The exit code is 1 if a gradient was further
behind than `staleness`, or if AdamW is not the best by more than the seeds' scatter.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks import families
from tests.benchmarks.optimizers import loss_of, part_of
from tidewheel.config import build
from tidewheel.console import print_table
from tidewheel.parts import as_json
from tidewheel.train import parallel
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.build import build_optimizer
from tidewheel.train.runtime import Runtime

ROWS: dict[str, dict[str, Any]] = {
    "AdamW, synchronous": {},
    "2BW: constant 1": {"staleness": 1},
    "constant 4": {"staleness": 4},
    "constant 4, compensated": {"staleness": 4, "compensation": 2.0},
    "Hogwild: random up to 4": {"staleness": 4, "order": "random"},
    "PipeDream: 2 stages": {"staleness": 1, "order": "pipeline"}}


def task(folder: Path, data: str, row: str, seed: int, steps: int) -> TrainConfig:
    """Return the run of a row with a seed."""
    base = families.settings(families.shapes()["llama"], "llama", data, str(folder), steps).canonical()
    kind = "stale" if ROWS[row] else "adamw"
    name = "".join(letter if letter.isalnum() else "-" for letter in row)
    return build(TrainConfig, {
        **base, "run": {"id": f"{name}-{seed}", "uri": str(folder / f"runs-{steps}")}, "seed": seed,
        "optimizer": as_json(part_of(kind, **ROWS[row])), "schedule": {"warmup_steps": 20}})


def behind(config: TrainConfig, steps: int) -> list[int]:
    """Return how many updates the gradients of each step are behind, of the parameters that are furthest."""
    model = parallel.build(config, families.VOCABULARY, Runtime())
    rules: list[Any] = build_optimizer(model, config.optimizer).parts
    return [max(getattr(rule, "behind", lambda _: 0)(update) for rule in rules) for update in range(steps)]


def main() -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", default="")
    options = parser.parse_args()
    folder = Path(options.output or tempfile.mkdtemp(prefix="staleness-"))
    data = families.made_data(str(folder))
    rows, wrong = [], []
    best = [0.0]
    for row in ROWS:
        configs = [task(folder, data, row, seed, options.steps) for seed in range(options.seeds)]
        losses, late = [loss_of(config) for config in configs], behind(configs[0], options.steps)
        best = losses if not rows else best
        over = [loss - other for loss, other in zip(losses, best)]
        scatter = statistics.stdev(over) if len(over) > 1 else 0.0
        rows.append({"gradients": row, "behind, mean and most": f"{statistics.mean(late):.2f}, {max(late)}",
                     "loss": f"{statistics.mean(losses):.3f}", "above synchronous": f"{statistics.mean(over):+.3f}",
                     "scatter": f"{scatter:.3f}"})
        wrong += [f"{row}: behind {max(late)}"] * (max(late) > ROWS[row].get("staleness", 0))
        wrong += [f"{row}: better than AdamW"] * (statistics.mean(over) < -2 * scatter - 0.01)
    print_table(rows, title=f"{options.steps} steps, {options.seeds} seeds")
    print("\n".join(wrong) or "no gradient was further behind than its setting")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
