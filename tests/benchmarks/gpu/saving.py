"""How long training stands still for a copy in the memory tier, and for an asynchronous save to storage.

A step that follows `snapshot` or `save`, with the call itself, is compared with a step that follows nothing. The stall
is the difference: the copy runs beside the forward and backward pass, and the update waits for what is left of it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.case import Case
from tests.benchmarks.gpu.ours import Ours
from tests.benchmarks.gpu.timing import learning, wait
from tidewheel import storage
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.memory_tier.agent import Agent
from tidewheel.checkpoint.memory_tier.client import MemoryTier
from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.checkpoint.memory_tier.slots import SHARED_MEMORY, SLOTS_PER_WORKER

TOKEN = "benchmark"
PLAIN_STEPS, SNAPSHOTS, SAVES = 6, 4, 2


class Stepping:
    """Steps with their times."""

    def __init__(self, case: Case) -> None:
        self.case, self.ours, self.index = case, Ours(case), 0
        self.losses: list[float] = []
        for _ in range(case.warm):
            self.seconds()
        self.plain = statistics.median(self.seconds() for _ in range(PLAIN_STEPS))

    def seconds(self, before: Callable[[], None] = lambda: None, settle: Callable[[], None] = lambda: None) -> float:
        """Do a step and return its seconds.

        Args:
            before: called before it, and counted.
            settle: waits until parameters may change.
        """
        wait(self.case.device)
        began = time.perf_counter()
        before()
        self.losses.append(self.ours.step(self.index, settle))
        wait(self.case.device)
        self.index += 1
        return time.perf_counter() - began

    def bytes(self) -> int:
        return sum(tensor.nbytes for group in self.ours.state().values() for tensor in group.values())

    def figures(self, stalls: list[float], **others: Any) -> dict[str, Any]:
        """Return a row.

        Args:
            stalls: seconds that steps took longer.
            others: further figures.
        """
        stall = statistics.median(stalls)
        return {"rows": self.case.rows, "length": self.case.length, "ms": 1000 * self.plain, "stall_ms": 1000 * stall,
                "stall_ms_all": [1000 * value for value in stalls], "stall_share": stall / self.plain,
                "state_gb": self.bytes() / 1e9, **learning(self.losses), **others}


def memory_tier(case: Case) -> dict[str, Any]:
    """Measure the stall of copies to shared memory, without a second node to send them to."""
    stepping = Stepping(case)
    size = stepping.bytes()
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < SLOTS_PER_WORKER * size:
        raise RuntimeError(f"{SLOTS_PER_WORKER} slots of {size / 1e9:.0f} GB do not fit in {SHARED_MEMORY}, which has "
                           f"{free / 1e9:.0f} GB free")
    stalls, setup = [], []
    with _agent() as address:
        tier = MemoryTier({0: address}, address, [], 0, 1, TOKEN)
        tier.prepare(stepping.ours.state())
        for count in range(SNAPSHOTS + SLOTS_PER_WORKER):
            def keep(step: int = count) -> None:
                tier.snapshot(step, stepping.ours.state(), {"step": step})

            extra = stepping.seconds(keep, tier.settle) - stepping.plain
            (stalls if count >= SLOTS_PER_WORKER else setup).append(extra)  # the first ones wait for their slots
            tier.flush()  # an interval leaves time for the hash
        if not tier.working:
            raise RuntimeError("the memory tier was given up; see the log")
        copied, hashed = tier.last["copy_seconds"], tier.last["hash_seconds"]
        tier.close()
    return stepping.figures(stalls, first_stall_ms=1000 * max(setup), copy_gb_per_second=size / 1e9 / copied,
                            hash_gb_per_second=size / 1e9 / hashed)


def save(case: Case) -> dict[str, Any]:
    """Measure the stall of asynchronous saves."""
    stepping = Stepping(case)
    size = stepping.bytes()
    with _folder(3 * size) as folder:
        events = list[tuple[str, dict[str, Any]]]()
        manager = CheckpointManager(storage.store(str(folder)), keep_last=1,
                                    on_event=lambda kind, detail: events.append((kind, detail)))
        stalls, written = [], []
        for count in range(1 + SAVES):
            def begin(step: int = count + 1) -> None:
                manager.save(step, stepping.ours.state(), {})

            began = time.perf_counter()
            stalls.append(stepping.seconds(begin, manager.settle) - stepping.plain)
            manager.wait()
            written.append(time.perf_counter() - began)
        commits = sum(kind == "commit" for kind, _ in events)
        if commits != 1 + SAVES:
            raise RuntimeError(f"{commits} of {1 + SAVES} saves were committed: {events[-1]}")
    return stepping.figures(stalls[1:], first_stall_ms=1000 * stalls[0],  # the first allocates page-locked memory
                            write_gb_per_second=size / 1e9 / statistics.median(written[1:]),
                            note="to shared memory" if folder.is_relative_to(SHARED_MEMORY) else "to local disk")


@contextlib.contextmanager
def _folder(needed: int) -> Iterator[Path]:
    """Yield a folder in shared memory, or on disk if there is more room."""
    root = SHARED_MEMORY if shutil.disk_usage(SHARED_MEMORY).free > needed else Path(tempfile.gettempdir())
    folder = Path(tempfile.mkdtemp(prefix="tidewheel-save-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def _agent() -> Iterator[Address]:
    """Yield the address of a memory agent in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield Address(*ours.recv())
    finally:
        ours.send(None)
        process.join(30)


def _serve(pipe: Any) -> None:
    agent = Agent("127.0.0.1", TOKEN, "benchmark")
    pipe.send(tuple(agent.address))
    pipe.recv()
    agent.stop()
