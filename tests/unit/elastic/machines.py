"""A coordinator and workers in processes of their own, so that a test can freeze the coordinator's machine.

A worker writes a line for each thing that happens to it: `joined`, and `asked` when it reads the run's commit log.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tidewheel.commit_log import CommitLog
from tidewheel.elastic import owner_watch
from tidewheel.elastic.connection import Endpoint
from tidewheel.elastic.coordinator import Coordinator
from tidewheel.elastic.member import Member
from tidewheel.elastic.messages import ExitReason, Join, Left, Over
from tidewheel.ownership import acquire
from tidewheel.storage import store
from tidewheel.train.config import ElasticConfig


class Machine:
    """A process of this module.

    Args:
        arguments: of `main`.
    """

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.elastic.machines", *arguments], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3], env=dict(os.environ))

    def freeze(self) -> None:
        """Stop the process. Its kernel still acknowledges what it gets."""
        self.process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let the process continue."""
        self.process.send_signal(signal.SIGCONT)

    def line(self) -> str:
        """Wait for the next line that the process writes, and return it; "" if it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def finish(self) -> None:
        """Let a worker report that its last step is done."""
        assert self.process.stdin is not None
        self.process.stdin.write("finish\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.communicate()


@contextmanager
def coordinator_of(run: Path, workers: int) -> Iterator[tuple[Machine, Endpoint]]:
    """Own a run in a process with its coordinator, and yield the process and where it listens.

    Args:
        run: folder of the run.
        workers: the only legal number of workers.
    """
    machine = Machine("coordinator", str(run), str(workers))
    try:
        values = json.loads(machine.line())
        yield machine, Endpoint(**{**values, "address": tuple(values["address"])})
    finally:
        machine.close()


@contextmanager
def workers_of(endpoint: Endpoint, names: str) -> Iterator[list[Machine]]:
    """Run workers that have joined a generation.

    Args:
        endpoint: of their coordinator.
        names: a letter for each worker.
    """
    machines = [Machine("worker", json.dumps(asdict(endpoint)), name) for name in names]
    try:
        for machine in machines:
            assert machine.line() == "joined"
        yield machines
    finally:
        for machine in machines:
            machine.close()


def _coordinate(folder: str, workers: int) -> None:
    unwatched: Any = Coordinator
    unwatched._watch = lambda self: None  # the real one asks Ray
    epoch = acquire(store(folder)).epoch
    coordinator = Coordinator(folder, ElasticConfig(max_workers=workers), (workers,), epoch=epoch)
    coordinator.start("127.0.0.1")
    print(json.dumps(asdict(coordinator.endpoint())), flush=True)
    sys.stdin.read()


def _work(endpoint: Endpoint, name: str) -> None:
    head = CommitLog.head

    def seen_head(log: CommitLog) -> Any:
        print("asked", flush=True)
        return head(log)

    seen: Any = CommitLog
    seen.head = seen_head
    owner_watch.AGAIN_SECONDS = 0.1
    member = Member(endpoint, name, f"node of {name}")
    while True:
        match member.orders.get():
            case Join() as order:
                print("joined", flush=True)
                sys.stdin.readline()
                member.send(Left(order.generation, ExitReason.FINISHED))
            case Over():
                return


def main() -> None:
    if sys.argv[1] == "coordinator":
        _coordinate(sys.argv[2], int(sys.argv[3]))
    else:
        values = json.loads(sys.argv[2])
        _work(Endpoint(**{**values, "address": tuple(values["address"])}), sys.argv[3])


if __name__ == "__main__":
    main()
