"""Measure the platform's overhead: a Tidewheel run and a bare PyTorch loop of the same model alternate step by step.

    python -m tests.benchmarks.overhead [--pairs 100] [--warm 10] [--length 256] [--preset NAME] [--threads 1]

Tidewheel's step is everything between two steps of `tidewheel train --local`: loader, digest of the batch, guards,
report, metrics.jsonl, TensorBoard, events, ledger. The bare loop has its batches in memory and does the steps of any
tutorial: forward, backward, `clip_grad_norm_`, AdamW. The two alternate, so that other load on the machine affects
both. The limits are 2 % more time, and 1 % of a step waiting for data; the exit code is 1 when one is exceeded. CPU
time includes Tidewheel's threads.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.benchmarks.loader import write_shards
from tidewheel import jsonlog, storage
from tidewheel.config import build
from tidewheel.console import print_table
from tidewheel.models.decoder import Decoder
from tidewheel.models.initial_values import init_parameter
from tidewheel.train.batches import micro_batch
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.runtime import NoControl, Runtime
from tidewheel.train.step import MicroBatch

WANTED_OVERHEAD, WANTED_WAIT = 0.02, 0.01


@dataclass
class Clock:
    """Wall and CPU seconds of one side's steps."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    _begin: tuple[float, float] = (0.0, 0.0)

    def start(self) -> None:
        """Start timing a step."""
        self._begin = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        """Stop timing the step."""
        self.wall.append(time.perf_counter() - self._begin[0])
        self.cpu.append(time.process_time() - self._begin[1])


class InTurn(NoControl):
    """A control that does a step of the bare loop after each step of the run."""

    def __init__(self, bare: Iterator[float]) -> None:
        self.ours, self.bare, self.losses = Clock(), Clock(), list[float]()
        self._bare = bare

    def progress(self, step: int, steps: int, **metrics: Any) -> None:
        if step > 1:  # the first step was not started
            self.ours.stop()
        self.bare.start()
        self.losses.append(next(self._bare))
        self.bare.stop()
        self.ours.start()


def main() -> int:
    """Measure, print the table and return the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pairs", type=int, default=100)
    arguments.add_argument("--warm", type=int, default=10)
    arguments.add_argument("--length", type=int, default=256)
    arguments.add_argument("--preset", default="")
    arguments.add_argument("--threads", type=int, default=1)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="tw-overhead-") as folder:
        uri = str(Path(folder, "shards"))
        rows = 8 * (options.pairs + options.warm + 1)
        tokens = np.random.default_rng(0).integers(2, 2000, (rows, options.length), dtype=np.uint16)
        write_shards(uri, tokens, vocabulary=2048, document=options.length // 4)
        config = _config(folder, uri, options)
        control = InTurn(_bare_loop(config, uri))
        train(config, Runtime(control=control))
        metrics = [line for line in jsonlog.read(storage.store(config.run_uri), "metrics.jsonl") if "loss" in line]
    return _report(control, metrics, config, options)


def _config(folder: str, uri: str, options: Any) -> TrainConfig:
    model: dict[str, Any] = {"preset": options.preset} if options.preset else {
        "dim": 192, "num_layers": 4, "num_heads": 3, "tie_embeddings": True}
    return build(TrainConfig, {
        "run": {"id": "overhead", "uri": str(Path(folder, "runs"))}, "data": {"uri": uri}, "model": model,
        "steps": options.pairs + options.warm + 1, "schedule": {"kind": "constant", "warmup_steps": 0},
        "batch": {"global_sequences": 8, "micro_sequences": 4, "virtual_ranks": 2},
        "evaluation": {"sample_tokens": 0}, "checkpoint": {"every_steps": 0},
        "elastic": {"cpus_per_worker": options.threads}})


def _bare_loop(config: TrainConfig, uri: str) -> Iterator[float]:
    """Yield the loss per target of one step after the other; each step runs when its value is requested."""
    batches = _batches(config, uri)
    model = Decoder(config.model, 2048)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_parameter(name, parameter.shape, config.model, config.seed))
    decayed = [p for name, p in model.named_parameters() if p.ndim > 1 and not name.startswith("embedding.")]
    undecayed = [p for name, p in model.named_parameters() if p.ndim <= 1 or name.startswith("embedding.")]
    adamw = torch.optim.AdamW([{"params": decayed, "weight_decay": config.optimizer.weight_decay},
                               {"params": undecayed, "weight_decay": 0.0}], lr=config.optimizer.learning_rate,
                              betas=config.optimizer.betas, foreach=True)
    step = 0
    while True:
        micros = batches[step % len(batches)]
        targets = sum(micro.num_targets for micro in micros)
        adamw.zero_grad(set_to_none=True)
        total = 0.0
        for micro in micros:
            loss = model(micro.tokens, micro.positions, micro.segment_ids, micro.targets) / targets
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm, foreach=True)
        adamw.step()
        step += 1
        yield total


def _batches(config: TrainConfig, uri: str) -> list[list[MicroBatch]]:
    """Return the run's own batches in memory."""
    from tidewheel.shards.source import SourceReader, open_source

    reader, batch = SourceReader(open_source(uri, None, config.data.seed)), config.batch
    batches = []
    for first in range(0, config.steps * batch.global_sequences, batch.global_sequences):
        rows = reader.read(np.arange(first, first + batch.global_sequences))
        batches.append([micro_batch(rows, slice(start, start + batch.micro_sequences), 0, torch.device("cpu"))
                      for start in range(0, batch.global_sequences, batch.micro_sequences)])
    return batches


def _report(control: InTurn, metrics: list[dict[str, Any]], config: TrainConfig, options: Any) -> int:
    tokens = config.batch.global_sequences * options.length
    sides = {"bare PyTorch": control.bare, "Tidewheel": control.ours}
    for clock in sides.values():
        del clock.wall[:options.warm], clock.cpu[:options.warm]
    pairs = list(zip(control.bare.wall, control.ours.wall))
    rows = []
    for name, clock in sides.items():
        rows.append({"": name, "ms a step, median": f"{1000 * statistics.median(clock.wall):.1f}",
                     "tokens/s": f"{tokens / statistics.median(clock.wall):,.0f}",
                     "CPU ms a step": f"{1000 * statistics.median(clock.cpu):.1f}"})
    print_table(rows, title=f"{len(pairs)} pairs, {tokens:,} tokens a step, {options.threads} thread(s)")
    ratios = sorted(ours / bare - 1 for bare, ours in pairs)
    overhead = statistics.median(ratios)
    cpu = statistics.median(ours / bare - 1 for bare, ours in zip(control.bare.cpu, control.ours.cpu))
    lines = metrics[options.warm:]
    waited = sum(line["data_wait_seconds"] for line in lines) / sum(line["step_seconds"] for line in lines)
    spread = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
    print(f"Tidewheel's step takes {overhead:+.2%} (middle half of the pairs {spread[0]:+.2%} to {spread[1]:+.2%}), "
          f"{cpu:+.2%} CPU time; asked for: at most {WANTED_OVERHEAD:.0%}")
    print(f"waiting for data: {waited:.2%} of the step; asked for: less than {WANTED_WAIT:.0%}")
    print(f"loss at the end: Tidewheel {metrics[-1]['loss']:.4f}, bare {control.losses[-1]:.4f}")
    return int(overhead > WANTED_OVERHEAD or waited >= WANTED_WAIT)


if __name__ == "__main__":
    sys.exit(main())
