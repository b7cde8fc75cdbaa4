"""Tests that ranks name a hanging rank in bounded time, with real processes, one of them stopped by a signal."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.ranks import _rank
from tidewheel.train.guards.config import GuardsConfig
from tidewheel.train.guards.hang import Beat, HangError, Watch, find

SECONDS = 3.0
SLEEP_SECONDS = 500.0
"""Time after which a rank that only sleeps goes on: much longer than it takes to notice it, about 2 * SECONDS."""


def free_port() -> int:
    """Return a free port below those that the kernel gives to clients, so that none of them takes it meanwhile."""
    while True:
        port = random.randint(20_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port


def beat(number: int, marks: int = 5, collectives: int = 9, step: int = 2, phase: str = "report") -> Beat:
    return Beat(number, marks, step, phase, {"g": collectives})


@pytest.mark.parametrize(("late", "says"), [
    ({1: (beat(4, phase="data"), beat(4, phase="data"))}, "rank 1 does not answer, last seen at step 2 (data)"),
    ({1: (None, None)}, "rank 1 does not answer and never did"),
    ({1: (beat(4, 3, step=1), beat(6, 3, step=1))}, "rank 1 is still at step 1 (report)"),
    ({1: (beat(4, collectives=8), beat(6, collectives=8))}, "rank 1 is still at step 2 (report)"),
])
def test_the_rank_that_is_behind_is_named(late: dict, says: str):
    before = {rank: late.get(rank, (beat(4), None))[0] for rank in range(3)}
    after = {rank: late.get(rank, (None, beat(6)))[1] for rank in range(3)}
    hang = find(before, after, 7)
    assert hang == (f"{says}; 2 ranks have waited 7 s at step 2 (report)", (1,))


def test_no_rank_is_named_when_none_is_behind():
    assert find({0: beat(1), 1: beat(1)}, {0: beat(3), 1: beat(4)}, 7) == ("", ())


def watched(folder: str, fault: str) -> None:
    """Run steps of one all-reduce in which one rank of three stops. Each other rank writes its error and time."""
    rank = dist.get_rank()
    hangs: list[str] = []
    config = GuardsConfig(collective_timeout_seconds=SECONDS, start_timeout_seconds=60)
    watch = Watch(config, rank, 3, on_hang=hangs.append)
    output, began = Path(folder), time.time()
    try:
        for step in range(1, 8):
            watch.mark(step, "data")
            if step == 4:
                time.sleep(2.0 * SECONDS)  # on all ranks: a long step is no hang
                assert not hangs
                began = time.time()
            if step == 5 and rank == (0 if fault == "store" else 1):
                output.joinpath("stopped").write_text(str(os.getpid()))
                if fault != "sleep":
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(SLEEP_SECONDS)
            watch.mark(step, "report")
            dist.all_reduce(torch.ones(8))
            watch.started()
    except RuntimeError as error:
        explained = watch.explained(error)
        ranks = ",".join(map(str, getattr(explained, "ranks", ())))
        output.joinpath(f"rank{rank}").write_text(
            f"{type(explained).__name__} {time.time() - began:.1f} [{ranks}] {explained}")
        os._exit(0)  # the group cannot be used any more


def test_a_stopped_rank_is_named():
    """Three groups run in parallel: a rank stopped by a signal, a busy rank, and a stopped rank with the store."""
    folders = {fault: tempfile.mkdtemp() for fault in ("signal", "sleep", "store")}
    contexts = [mp.start_processes(_rank, (3, f"tcp://127.0.0.1:{free_port()}", watched, (folder, fault)), nprocs=3,
                                   join=False, start_method="forkserver") for fault, folder in folders.items()]
    try:
        for fault, folder in folders.items():
            still = 0 if fault == "store" else 1
            for rank in {0, 1, 2} - {still}:
                path = Path(folder, f"rank{rank}")
                until = time.time() + 600
                while not path.exists() and time.time() < until:
                    time.sleep(0.1)
                kind, seconds, ranks, text = path.read_text().split(" ", 3)
                assert kind == HangError.__name__, text
                assert float(seconds) < SLEEP_SECONDS, "the others wait until it is back"
                says = {"sleep": r"rank 1 is still at step 5 \(data\); 2 ranks have waited 3 s at step 5 \(report\)",
                        "signal": r"rank 1 does not answer, last seen at step [45] .*; 2 ranks have waited 3 s",
                        "store": "of rank 0, which hosts the store, is stopped or gone"}[fault]
                assert re.fullmatch(f".*{says}.*", text), text
                assert ranks == ("[]" if fault == "store" else "[1]"), "every rank accuses the same ones"
    finally:
        for context in contexts:
            for process in context.processes:
                process.kill()
