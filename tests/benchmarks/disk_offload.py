"""Measure updates with optimizer state on disk: beside the disk's own speed, and beside updates in memory.

    python -m tests.benchmarks.disk_offload [--folder /local_nvme] [--parameters 64] [--repeats 5]

The disk's own speed is that of plain threads, which read and write as many bytes as an update does, in large aligned
pieces with O_DIRECT. The goal is for an update that computes nothing, so that the disk alone decides: an update by the
CPU overlaps with the disk, and takes as long as the slower of them. All take turns, so that they see the same disk; the
medians are compared. Steps are those of a decoder on this CPU, offloaded, with state in memory and on disk.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tidewheel.config import build as build_config
from tidewheel.train import optimizers, parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.base import allocate
from tidewheel.train.optim.build import build_optimizer
from tidewheel.train.optim.disk_state import DiskState
from tidewheel.train.optimizers.rules.host_adam import HostAdamW
from tidewheel.train.parallel.mesh import close_own_group
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import MicroBatch, train_step

GOAL = 0.8
BLOCK, THREADS = 4 << 20, 8
VOCABULARY, LENGTH = 8192, 128


def seconds(call: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Disk:
    """The disk itself: a file of `size` bytes, half of the threads read all of it and half write all of it.

    Args:
        folder: on the disk.
        size: in bytes, a multiple of `BLOCK`.
    """

    def __init__(self, folder: Path, size: int) -> None:
        handle, path = tempfile.mkstemp(dir=folder)
        os.posix_fallocate(handle, 0, size)
        os.close(handle)
        self._handle = os.open(path, os.O_RDWR | os.O_DIRECT)
        os.unlink(path)
        self._size, self._memory = size, [mmap.mmap(-1, BLOCK) for _ in range(THREADS)]
        self.pass_over()  # later writes find allocated blocks, as those of the state do

    def pass_over(self) -> None:
        """Read the file and write it, at once."""
        half = THREADS // 2
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(self._move, range(THREADS), [os.preadv] * half + [os.pwritev] * half))

    def _move(self, thread: int, move: Callable[..., int]) -> None:
        half = THREADS // 2
        for place in range(thread % half * BLOCK, self._size, half * BLOCK):
            assert move(self._handle, [self._memory[thread]], place) == BLOCK


def parameters(millions: int) -> list[torch.nn.Parameter]:
    """Return matrices of 4.2 million parameters each, with gradients."""
    matrices = [torch.nn.Parameter(torch.randn(2048, 2048) * 0.02) for _ in range(max(1, millions * 10**6 >> 22))]
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    return matrices


def update_rows(folder: Path, millions: int, repeats: int) -> tuple[list[tuple[str, str]], bool]:
    """Return rows about updates by the CPU kernel of offloaded parameters, and whether the goal is met."""
    state = ("step", "exp_avg", "exp_avg_sq")
    held = parameters(millions)
    count = sum(matrix.numel() for matrix in held)
    unfused = allocate(torch.optim.AdamW(held, lr=1e-4, foreach=True), state)
    unfused.step()
    slow = statistics.median(seconds(unfused.step) for _ in range(3))
    unfused.state.clear()
    kept = allocate(HostAdamW(held, lr=1e-4), state)
    kept.step()
    in_memory = statistics.median(seconds(kept.step) for _ in range(3))
    moved = allocate(HostAdamW(held, lr=1e-4), state)
    disk = DiskState(folder, [moved])
    kept.state.clear()
    plain = Disk(folder, disk.bytes // BLOCK * BLOCK)
    update = moved.step
    disk.step(moved, lambda _: None)
    times: list[tuple[float, float, float]] = []
    for _ in range(repeats):
        moved.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
        idle = seconds(lambda: disk.step(moved, lambda _: None))
        moved.step = update  # type: ignore[method-assign]
        times.append((seconds(plain.pass_over), idle, seconds(lambda: disk.step(moved, lambda _: None))))
    own, through, on_disk = (statistics.median(column) for column in zip(*times))
    share = own / through
    moved_bytes = 2 * disk.bytes
    disk.close()
    return [
        ("parameters", f"{count / 1e6:.0f} million, {disk.bytes / 1e9:.2f} GB of state"),
        ("direct reads and writes", "yes" if disk.direct else "no: the file system refuses them"),
        ("update in memory, torch's foreach AdamW", f"{slow:.2f} s"),
        ("update in memory, the kernel of offloaded parameters", f"{in_memory:.2f} s"),
        ("the disk itself, as many bytes", f"{own:.2f} s, {moved_bytes / own / 1e9:.2f} GB/s"),
        ("state read and written, nothing computed", f"{through:.2f} s, {moved_bytes / through / 1e9:.2f} GB/s"),
        ("share of the disk's own speed", f"{share:.0%}"),
        ("update with state on disk", f"{on_disk:.2f} s")], share >= GOAL


def step_rows(folder: Path, repeats: int) -> list[tuple[str, str]]:
    """Return rows about whole steps of a decoder, offloaded, in memory and on disk."""
    config = build_config(TrainConfig, {
        "model": {"dim": 512, "num_layers": 8, "num_heads": 8, "ffn_dim": 1536},
        "parallel": {"data": "zero3", "offload": True}, "elastic": {"max_workers": 1},
        "batch": {"global_sequences": 4, "micro_sequences": 2, "virtual_ranks": 1}})
    batches = [batch(seed) for seed in range(2)]
    times: dict[bool, float] = {}
    for on_disk in (False, True):
        model = parallel.build(config, VOCABULARY, Runtime())
        parallel.init_weights(model, 0)
        optimizer = build_optimizer(model, config.optimizer)
        if on_disk:
            optimizer.move_to_disk(folder)
        collectives = Collectives(Runtime())

        def step(model: Any = model, optimizer: Any = optimizer, collectives: Any = collectives) -> None:
            train_step(model, optimizer, batches, collectives, virtual_ranks=1, clip_norm=1.0)

        step()
        times[on_disk] = statistics.median(seconds(step) for _ in range(repeats))
        count = model.num_parameters
    close_own_group()
    return [("a step of a decoder, state in memory", f"{count / 1e6:.0f} million parameters, {times[False]:.2f} s"),
            ("the same, state on disk", f"{times[True]:.2f} s, {times[True] / times[False]:.2f} times as long")]


def batch(seed: int) -> MicroBatch:
    """Return random rows of one document each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    return MicroBatch(tokens, positions, torch.zeros_like(tokens), tokens.roll(-1, 1), 0, tokens.numel(),
                      tokens.numel())


def eight_bit_rows() -> list[tuple[str, str]]:
    """Return a row about the update with 8-bit moments on a CPU."""
    held = parameters(8)
    optimizer = optimizers.KIND.build("adamw8bit", {}).build_all([(f"blocks.0.{index}.weight", matrix)
                                                                   for index, matrix in enumerate(held)])[0]
    optimizer.step()
    each = statistics.median(seconds(optimizer.step) for _ in range(3)) / sum(matrix.numel() for matrix in held)
    return [("update in memory with 8-bit moments", f"{each * 1e9:.1f} ns a parameter")]


def print_rows(rows: list[tuple[str, str]]) -> None:
    """Print rows of a table in Markdown."""
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    arguments.add_argument("--parameters", type=int, default=64, help="millions")
    arguments.add_argument("--repeats", type=int, default=5)
    options = arguments.parse_args()
    rows, good = update_rows(options.folder, options.parameters, options.repeats)
    print("| | |\n|---|---|")
    print_rows(rows)
    print_rows(eight_bit_rows())
    print_rows(step_rows(options.folder, options.repeats))
    print(f"\n{'at least' if good else 'less than'} {GOAL:.0%} of the disk's own speed")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
