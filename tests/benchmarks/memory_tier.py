"""Measure what the memory tier costs a step and how fast it copies and restores, compared with plain checkpoints.

    python -m tests.benchmarks.memory_tier [--preset 125m] [--tokens 512] [--rounds 4] [--block 3] [--waits]
        [--wait-steps 60]

One worker and two agents are processes on this machine, and copies go from one agent to the other over loopback TCP. A
step is forward, backward and AdamW of the model on `tokens` tokens, much less work than a real step, so the tier's
share is much larger than in practice. Blocks of steps with a snapshot after each alternate with blocks without, so that
other load on the machine affects both. The plain checkpoint is `CheckpointManager` on local disk: the time of a
synchronous save, and the time that an asynchronous save holds up training, at its call and before the next update. At
125 M parameters the limits are 5 % more time per step, and a stall of 2 % of a step or 50 ms, and of 3 % of a
synchronous save. The exit code is 1 when one is exceeded.

A last table counts how long training stands still for the tier with a snapshot after every step, and with the automatic
interval. `--waits` measures only that, with the small model.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from tidewheel import storage
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.memory_tier.agent import NICENESS, Agent
from tidewheel.checkpoint.memory_tier.client import MemoryTier
from tidewheel.checkpoint.memory_tier.interval import KeepInterval
from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.checkpoint.memory_tier.restore import inventory, load, newest_complete
from tidewheel.checkpoint.memory_tier.slots import SLOTS_PER_WORKER
from tidewheel.console import print_table
from tidewheel.models.decoder import Decoder
from tidewheel.models.families import Llama
from tidewheel.models.initial_values import init_parameter

WANTED = 0.05
TOKEN = "benchmark"
SMALL = {"dim": 192, "num_layers": 6, "num_heads": 3, "tie_embeddings": True}


class Training:
    """A model, its optimizer and their step."""

    def __init__(self, config: Llama, vocabulary: int, tokens: int) -> None:
        self._model = Decoder(config, vocabulary)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(init_parameter(name, parameter.shape, config, 0))
        self._adamw = torch.optim.AdamW(self._model.parameters(), foreach=True)
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(0, vocabulary, (1, tokens), generator=generator)
        self._positions = torch.arange(tokens)[None]
        self.step()  # creates the moments

    def step(self, before_update: Callable[[], None] = lambda: None) -> None:
        self._adamw.zero_grad(set_to_none=True)
        loss = self._model(self._tokens, self._positions, torch.zeros_like(self._tokens), self._tokens.roll(-1))
        (loss / self._tokens.numel()).backward()
        before_update()
        self._adamw.step()

    def state(self) -> dict[str, Any]:
        moments = {f"{name}.{key}": self._adamw.state[parameter][key]
                   for name, parameter in self._model.named_parameters() for key in ("exp_avg", "exp_avg_sq")}
        return {"model": {name: parameter.detach() for name, parameter in self._model.named_parameters()},
                "optimizer": moments}

    def bytes(self) -> int:
        return sum(tensor.nbytes for group in self.state().values() for tensor in group.values())


def _agent(pipe: Any) -> None:
    os.nice(NICENESS)
    agent = Agent("127.0.0.1", TOKEN, "benchmark")
    pipe.send(tuple(agent.address))
    pipe.recv()
    agent.stop()


@contextlib.contextmanager
def _agents() -> Iterator[list[Address]]:
    """Yield the addresses of two agents without copies. Copies of other measurements would stay beside new ones."""
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    for _ in range(2):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_agent, args=(theirs,), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    try:
        yield [Address(*pipe.recv()) for pipe in pipes]
    finally:
        for pipe in pipes:
            with contextlib.suppress(BrokenPipeError):  # it was killed: memory is full
                pipe.send("stop")
        for process in processes:
            process.join()


def main() -> int:
    """Measure, print the tables and return the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--preset", default="125m")
    arguments.add_argument("--tokens", type=int, default=512)
    arguments.add_argument("--rounds", type=int, default=4)
    arguments.add_argument("--block", type=int, default=3)
    arguments.add_argument("--waits", action="store_true", help="measure only the time that training stands still")
    arguments.add_argument("--wait-steps", type=int, default=60, help="steps of each row of the last table")
    arguments.add_argument("--output", default="", help="also write the stalls as JSON, for tidewheel plan goodput")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    overhead, missed = 0.0, list[str]()
    rows, times, waits, keep_seconds = [], [], [], 0.0
    models = [("3 M", Llama(**SMALL), 2048), (options.preset, Llama(preset=options.preset), 32768)]
    for name, config, vocabulary in models[:1] if options.waits else models:
        training = Training(config, vocabulary, options.tokens)
        each, keep_seconds = _waits(training, 1, options.wait_steps)
        automatic, _ = _waits(training, "auto", options.wait_steps)
        waits += [{"state": name, **each}, {"state": name, **automatic}]
        if options.waits:
            continue
        with _agents() as addresses:
            row, overhead, step = _steps(training, addresses, options)
            time_rows, stall, whole = _times(name, training, addresses)
        rows.append({"state": f"{name}, {training.bytes() / 1e9:.3f} GB", **row})
        times += time_rows
        message = f"{name}: a save stalls for {1000 * stall:.1f} ms, {stall / step:.1%} of a step, " \
               f"{stall / whole:.1%} of a synchronous save"
        missed += [message] if stall > max(0.05, 0.02 * step) or stall > 0.03 * whole else []
        del training
    print_table(waits, title="training stands still for the tier")
    if options.output:
        Path(options.output).write_text(json.dumps({"kind": "memory_tier", "keep_seconds": keep_seconds,
                                                    **({} if options.waits else {"save_seconds": stall})}))
    if options.waits:
        return 0
    print_table(rows, title="a step with a snapshot after each, and without")
    print_table(times, title="keeping and giving back, seconds")
    print(f"{options.preset}: {overhead:+.1%}; asked for: at most {WANTED:+.0%}")
    print("\n".join(missed))
    return int(overhead > WANTED or bool(missed))


def _steps(training: Training, addresses: list[Address], options: Any) -> tuple[dict[str, str], float, float]:
    """Run blocks of steps with and without the tier; return a row, the tier's share and a step's seconds without it."""
    tier = _tier(addresses)
    began = time.perf_counter()
    tier.prepare(training.state())
    prepared = time.perf_counter() - began
    seconds: dict[bool, list[float]] = {True: [], False: []}
    stalls, copies, waits, hashes, pushes, count = [], [], [], [], [], 0
    for block in range(2 * options.rounds + 1):
        with_tier = block % 2 == 0
        for step in range(options.block):
            began = time.perf_counter()
            training.step(tier.settle)
            stalls += [tier.last["stall_seconds"]] if with_tier and block and step else []
            if with_tier:
                count += 1
                tier.snapshot(count, training.state(), {"step": count})
            if block and step:  # the first step of a block follows no snapshot, or one that is still being copied
                seconds[with_tier].append(time.perf_counter() - began)
            if with_tier and block and step:  # figures of the previous step's copy, except `wait_seconds`
                copies.append(tier.last["copy_seconds"])
                waits.append(tier.last["wait_seconds"])
                hashes.append(tier.last["hash_seconds"])
                pushes.append(tier.last["push_seconds"])
        tier.flush()
    tier.close()
    size = training.bytes() / 1e9
    middle = {with_tier: statistics.median(values) for with_tier, values in seconds.items()}
    overhead = middle[True] / middle[False] - 1
    return {"ms without": f"{1000 * middle[False]:.0f}", "ms with": f"{1000 * middle[True]:.0f}",
            "more": f"{overhead:+.1%}", "stall ms": f"{1000 * statistics.median(stalls):.1f}",
            "copy GB/s": f"{size / statistics.median(copies):.1f}",
            "waited ms": f"{1000 * statistics.median(waits):.1f}",
            "hash GB/s": f"{size / statistics.median(hashes):.1f}",
            "push GB/s": f"{size / statistics.median(pushes):.1f}", "slots ready s": f"{prepared:.2f}",
            }, overhead, middle[False]


def _tier(addresses: list[Address]) -> MemoryTier:
    return MemoryTier({0: addresses[0]}, addresses[0], addresses[1:], 0, 1, TOKEN, generation=0)


def _waits(training: Training, every_steps: int | Literal["auto"], steps: int) -> tuple[dict[str, str], float]:
    """Do steps with the tier as a run does; return a row about the time that training stands still for it, and the
    seconds of that for each copy."""
    with _agents() as addresses:
        return _stood_still(training, _tier(addresses), every_steps, steps)


def _stood_still(training: Training, tier: MemoryTier, every_steps: int | Literal["auto"],
                 steps: int) -> tuple[dict[str, str], float]:
    tier.prepare(training.state())
    interval = KeepInterval(every_steps, 0.02)
    kept, skipped, counted, still = 0, 0, 0, 0.0
    began = time.perf_counter()
    for step in range(1, steps + 1):
        training.step(tier.settle)
        due = interval.due(step, tier.costs)
        if due and every_steps == "auto" and tier.under_way():
            skipped += 1
        elif due:
            interval.began()
            tier.snapshot(step, training.state(), {"step": step})
            kept += 1
            if step > SLOTS_PER_WORKER:  # the first snapshots wait for their slots
                still += tier.last["wait_seconds"] + tier.last["stall_seconds"]
                counted += 1
    seconds = time.perf_counter() - began
    tier.flush()
    waits = tier.waits
    tier.close()
    return {"interval": str(every_steps), "ms a step": f"{1000 * seconds / steps:.1f}", "kept": str(kept),
            "skipped": str(skipped), "waited for the copy before": str(waits),
            "stood still, ms a step": f"{1000 * still / steps:.2f}", "share": f"{still / seconds:.1%}"
            }, still / counted if counted else 0.0


def _times(name: str, training: Training, addresses: list[Address]) -> tuple[list[dict[str, str]], float, float]:
    """Measure restores and plain checkpoints; return rows, the seconds of an asynchronous save's stall and of a
    synchronous save."""
    state, rows = training.state(), []

    def timed(what: str, action: Callable[[], Any]) -> float:
        took = []
        for _ in range(3):
            began = time.perf_counter()
            action()
            took.append(time.perf_counter() - began)
        middle = statistics.median(took)
        rows.append({"state": name, "what": what, "s": f"{middle:.3f}",
                     "GB/s": f"{training.bytes() / 1e9 / middle:.1f}"})
        return middle

    timed("restore from the own node", lambda: _restore(addresses, addresses[0], state))
    timed("restore from the replica, TCP", lambda: _restore(addresses[1:], None, state))
    with tempfile.TemporaryDirectory(prefix="tw-tier-") as folder:
        disk, steps = storage.store(folder), itertools.count(1)
        plain = CheckpointManager(disk, keep_last=1, asynchronous=False)
        whole = timed("save to disk, synchronous", lambda: plain.save(next(steps), state, {}))
        behind, stalls = CheckpointManager(disk, keep_last=1), []
        for _ in range(4):
            behind.save(next(steps), state, {})
            training.step(behind.settle)
            behind.wait()
            stalls.append(behind.saves().stall_seconds)
        stall = statistics.median(stalls[1:])  # the first allocates
        rows.append({"state": name, "what": "save to disk, stall only", "s": f"{stall:.4f}", "GB/s": ""})
        timed("load from disk", lambda: behind.load_latest(state))
    return rows, stall, whole


def _restore(asked: list[Address], mine: Address | None, state: dict[str, Any]) -> None:
    newest = newest_complete(inventory(asked, TOKEN))
    assert newest is not None
    load(newest, state, own_agent=mine)


if __name__ == "__main__":
    sys.exit(main())
