"""Compare compressed gradients with whole ones: loss at equal tokens, and bytes that a worker sends in a step.

    nice -n 10 python -m tests.benchmarks.compression [--optimizer adamw|sgd] [--steps 200] [--seeds 2]
        [--only NAME,NAME] [--output FOLDER]

The Llama of 128 x 2 layers of `tests.benchmarks.families` trains on ../shared/corpus with two workers under `ddp`. All
runs of a seed read the same batches with the same settings and begin with the same values; the learning rate is that of
whole gradients, and not tuned. Each method also runs with error feedback off, which shows what it is worth. That
depends on the optimizer: descent with momentum (`sgd`) is linear in the gradients, and what is sent late counts in
full; AdamW divides late, large values by their own size (https://arxiv.org/abs/2102.02888, section 3). Distances to
whole gradients are paired by seed; their 95 % interval is Student's, with the variance pooled over all methods.

`bytes` are those that the first worker handed to collectives for gradients, in the last step (`gradient_bytes` in
metrics.jsonl), for all tensors: those that a method sends whole count too.

A run that is in the output folder is not trained again. The exit code is 1 if a method is more than its `REACH` above
whole gradients, if it sends more than its share of `SHARES`, or if error feedback does not help a method of `NEEDS`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from scipy import stats

from tests.benchmarks import families
from tests.ranks import on_ranks
from tidewheel import jsonlog, storage
from tidewheel.config import build
from tidewheel.console import print_table
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.record import read_result
from tidewheel.train.runtime import Runtime

STEPS, SEEDS, WORKERS = 200, 2, 2
WHOLE = "whole"
METHODS: dict[str, dict[str, Any]] = {
    "topk 1 %": {"kind": "topk", "density": 0.01}, "randomk 10 %": {"kind": "randomk", "density": 0.1},
    "quantised 8": {"kind": "quantised", "bits": 8}, "quantised 4": {"kind": "quantised", "bits": 4},
    "one_bit": {"kind": "one_bit"}, "power_sgd 4": {"kind": "power_sgd", "rank": 4}}
OFF = ", no feedback"
SHARES = {"topk 1 %": 0.03, "randomk 10 %": 0.11, "quantised 8": 0.27, "quantised 4": 0.14, "one_bit": 0.04,
          "power_sgd 4": 0.08}
"""Largest share of the bytes of whole gradients."""
REACH = {"quantised 8": 0.05, "quantised 4": 0.05}
"""Largest mean distance above whole gradients, in nats a token, of methods that send every element in every step. The
others delay most of a gradient by more steps than this benchmark can wait for, and are only compared."""
NEEDS = {"adamw": ("topk 1 %", "power_sgd 4"), "sgd": ("topk 1 %", "randomk 10 %", "power_sgd 4")}
"""Methods whose loss must be better with error feedback than without, by optimizer."""


def configured(name: str, seed: int, folder: Path, data: str, steps: int, optimizer: str) -> TrainConfig:
    """Return the configuration of one run."""
    base = families.settings(families.shapes()["llama"], "llama", data, str(folder), steps, seed).canonical()
    method = METHODS.get(name.removesuffix(OFF))
    changes: dict[str, Any] = {
        "run": {"id": f"{name.replace(' %', '').replace(OFF, '-off').replace(' ', '-')}-{seed}",
                "uri": str(folder / f"runs-{steps}{'' if optimizer == 'adamw' else '-' + optimizer}")},
        "batch": {"global_sequences": 4, "micro_sequences": 2, "virtual_ranks": 2}, "parallel": {"data": "ddp"},
        "evaluation": {"sequences": 100, "sample_tokens": 0},
        "elastic": {"min_workers": 1, "max_workers": 2, "cpus_per_worker": 1}}
    if optimizer != "adamw":
        changes["optimizer"] = {"kind": optimizer}
    if method is not None:
        changes["compression"] = {**method, "error_feedback": not name.endswith(OFF)}
    return build(TrainConfig, {**base, **changes})


def train_all(configs: Sequence[TrainConfig]) -> None:
    """Train the runs that are not complete, one after the other, on all ranks."""
    for config in configs:
        began = time.monotonic()
        train(config, Runtime(dist.get_rank(), dist.get_world_size()))
        if dist.get_rank() == 0:
            print(f"{config.run.id}: {time.monotonic() - began:.0f} s", flush=True)


def measured(config: TrainConfig) -> tuple[float, int]:
    """Return a run's validation loss, and the bytes of gradients of its last step."""
    store = storage.store(config.run_uri)
    result = read_result(store)
    assert result is not None
    assert result.validation_loss is not None
    lines = [line for line in jsonlog.read(store, "metrics.jsonl") if "gradient_bytes" in line]
    return result.validation_loss, int(lines[-1]["gradient_bytes"])


def half_interval(distances: Mapping[str, Sequence[float]], count: int) -> float:
    """Return half of the 95 % interval of the mean of `count` distances, with the variance of all methods."""
    squares = sum((value - statistics.fmean(values)) ** 2 for values in distances.values() for value in values)
    freedom = sum(len(values) - 1 for values in distances.values())
    if not freedom:
        return 0.0
    return float(stats.t.ppf(0.975, freedom)) * math.sqrt(squares / freedom / count)


def main() -> int:
    """Make the shards, train the runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=NEEDS, default="adamw")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", default="", help="names of methods, separated by commas")
    parser.add_argument("--output", default="compression-output")
    options = parser.parse_args()
    folder = Path(options.output).resolve()
    data = families.made_data(str(folder))
    chosen = [name for name in METHODS if not options.only or name in options.only.split(",")]
    names = [WHOLE, *(name + end for name in chosen for end in ("", OFF))]
    configs = {name: [configured(name, seed, folder, data, options.steps, options.optimizer)
                      for seed in range(1, options.seeds + 1)] for name in names}
    missing = [config for seed in range(options.seeds) for config in (configs[name][seed] for name in names)
               if read_result(storage.store(config.run_uri)) is None]
    if missing:
        on_ranks(WORKERS, train_all, missing)
    results = {name: [measured(config) for config in configs[name]] for name in names}
    return report(results, options.steps, options.optimizer)


def report(results: Mapping[str, Sequence[tuple[float, int]]], steps: int, optimizer: str) -> int:
    """Print the table and what is wrong; return the exit code."""
    whole = results[WHOLE]
    distances = {name: [loss - other for (loss, _), (other, _) in zip(found, whole)]
                 for name, found in results.items() if name != WHOLE}
    half = half_interval(distances, len(whole))
    rows, wrong = [], []
    for name, found in results.items():
        loss, sent = statistics.fmean(value for value, _ in found), found[0][1]
        row = {"gradients": name, "loss": f"{loss:.3f}", "bytes a step": f"{sent:,}",
               "share": f"{sent / whole[0][1]:.1%}", "beside whole": ""}
        rows.append(row)
        if name == WHOLE:
            continue
        distance = statistics.fmean(distances[name])
        row["beside whole"] = f"{distance:+.3f} ± {half:.3f}"
        if name.endswith(OFF):
            continue
        wrong += [f"{name}: {distance:+.3f} above whole gradients"] if distance > REACH.get(name, math.inf) else []
        wrong += [f"{name}: {sent / whole[0][1]:.1%} of the bytes"] if sent > SHARES[name] * whole[0][1] else []
        if name in NEEDS[optimizer] and distance >= statistics.fmean(distances[name + OFF]):
            wrong.append(f"{name}: error feedback does not help")
    tokens = steps * 4 * families.LENGTH
    print_table(rows, title=f"validation loss after {tokens:,} tokens, nats a token, mean of {len(whole)} seeds, on "
                            f"{WORKERS} workers with {optimizer}")
    print("; ".join(wrong) or "all as they should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
