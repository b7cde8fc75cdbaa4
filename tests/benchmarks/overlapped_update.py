"""Measure updates of offloaded parameters during the backward pass (`parallel.overlap_update`) beside updates after it.

    nice -n 10 python -m tests.benchmarks.overlapped_update [--rounds 5] [--layers 4]

Steps of a decoder whose parameters and optimizer state are "offloaded" on a CPU worker, with and without overlap in
turn. `update` is the time of the update after the passes, `in thread` that of the updates beside them, and `left` what
of these is waited for when the passes have ended. `hidden` is the rest, as a share. It says nothing of how much the
updates slow the passes down; the lengths of whole steps do, on a quiet machine. With one thread for the passes, the
update has the second core of a machine to itself. With two, the passes and the update compete for the same cores, which
on a machine with a GPU they do not: there the host is idle during the passes. The kernel of `adamw` is that of
offloaded parameters (`train/optimizers/rules/host_adam.py`). The exit code is 1 if a parameter differs by a bit, or if
nothing of an update is hidden with one thread for the passes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

import torch

from tidewheel.config import build
from tidewheel.console import print_table
from tidewheel.models.decoder import next_tokens
from tidewheel.train import parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.build import build_optimizer
from tidewheel.train.optim.overlapped import overlap
from tidewheel.train.optimizers.rules import host_adam
from tidewheel.train.parallel import local
from tidewheel.train.parallel.mesh import close_own_group
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import MicroBatch, train_step

VOCABULARY, LENGTH = 1024, 128
STATES = {"fp32 moments": {"kind": "adamw"}, "8-bit moments": {"kind": "adamw8bit"}}


def batch(seed: int) -> MicroBatch:
    """Return random rows of one document each."""
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    segments = torch.zeros_like(tokens)
    targets = next_tokens(tokens, segments)
    return MicroBatch(tokens, torch.arange(LENGTH).expand(2, LENGTH), segments, targets, 0, tokens.numel(),
                      int((targets >= 0).sum()))


class Run:
    """A model that is trained step by step.

    Args:
        optimizer: its settings.
        layers: of the decoder.
        overlaps: whether updates overlap with the backward pass.
    """

    def __init__(self, optimizer: dict[str, Any], layers: int, *, overlaps: bool) -> None:
        config = build(TrainConfig, {
            "model": {"dim": 512, "num_layers": layers, "num_heads": 8, "ffn_dim": 1536},
            "optimizer": {**optimizer, "clip_norm": 0}, "guards": {"non_finite": "stop"},
            "parallel": {"data": "zero3", "offload": True, "overlap_update": overlaps}, "elastic": {"max_workers": 1},
            "batch": {"global_sequences": 2, "micro_sequences": 2, "virtual_ranks": 1}})
        self.model = parallel.build(config, VOCABULARY, Runtime())
        parallel.init_weights(self.model, 0)
        self._optimizer = build_optimizer(self.model, config.optimizer)
        self._collectives = Collectives(Runtime())
        self._update = self._optimizer.step
        self._optimizer.step = self._timed  # type: ignore[method-assign]
        if overlaps:
            overlap(self._optimizer, self.model.data)
        self.seconds: list[float] = []
        self.updates: list[float] = []
        self.beside: list[tuple[float, float]] = []

    def _timed(self, *arguments: Any, **named: Any) -> None:
        began = time.perf_counter()
        self._update(*arguments, **named)
        self.updates.append(time.perf_counter() - began)

    def step(self, seed: int) -> None:
        """Train one step on the batch of a seed."""
        began = time.perf_counter()
        train_step(self.model, self._optimizer, [batch(seed)], self._collectives, virtual_ranks=1)
        self.seconds.append(time.perf_counter() - began)
        overlapped = self._optimizer.overlapped
        if overlapped is not None:
            self.beside.append((overlapped.busy, overlapped.waited))

    def close(self) -> None:
        """End the thread."""
        if self._optimizer.overlapped is not None:
            self._optimizer.overlapped.close()


def measure(state: str, threads: int, layers: int, rounds: int) -> tuple[dict[str, str], list[str]]:
    """Return a row of the table, and what is wrong."""
    torch.set_num_threads(threads)
    plain, overlapped = (Run(STATES[state], layers, overlaps=overlaps) for overlaps in (False, True))
    for seed in range(rounds + 1):
        for run in ((plain, overlapped) if seed % 2 else (overlapped, plain)):
            run.step(seed)
    update = statistics.median(plain.updates[1:])
    without, beside = (statistics.median(run.seconds[1:]) for run in (plain, overlapped))
    in_thread, left = (statistics.median(column) for column in zip(*overlapped.beside[1:]))
    hidden = statistics.median(1 - waited / busy for busy, waited in overlapped.beside[1:])
    wrong = [f"{state}, {threads} threads: {name} differs" for (name, one), (_, other) in zip(
        plain.model.named_parameters(), overlapped.model.named_parameters())
             if not torch.equal(local(one), local(other))]
    wrong += [f"{state}: nothing of the update is hidden"] * (threads == 1 and hidden <= 0)
    millions = plain.model.num_parameters / 1e6
    for run in (plain, overlapped):
        run.close()
    close_own_group()
    return {"state": state, "threads of the passes": str(threads), "parameters": f"{millions:.0f} M",
            "update": f"{update:.2f} s", "in thread": f"{in_thread:.2f} s", "left": f"{left:.2f} s",
            "hidden": f"{hidden:.0%}", "step without": f"{without:.2f} s", "step with": f"{beside:.2f} s"}, wrong


def main() -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    host_adam.is_offloaded = lambda groups: True  # as where a GPU computes
    rows: list[dict[str, str]] = []
    wrong: list[str] = []
    for threads in (1, 2):
        for state in STATES:
            row, faults = measure(state, threads, options.layers, options.rounds)
            rows.append(row)
            wrong += faults
    print_table(rows, title=f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")
    print("\n".join(wrong) or "no parameter differs by a bit")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
