"""Measure the coordinator's own CPU time over the number of workers, with eight on a node behind a relay.

    python -m tests.benchmarks.control_plane_cpu [--workers 1024 4096 16384] [--profile]

The coordinator is the real one, with its membership, sessions, events and memory placement. The lines of the relays are
handed to it, and its answers taken from it, without sockets and without other processes: what is measured does not
depend on what else the machine does, and what the kernel does for a line is missing. `control_plane` measures all of
it together.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from tests.benchmarks.control_plane import RANKS_A_NODE, MeasuredCoordinator
from tidewheel.console import print_table
from tidewheel.elastic.messages import (
    CoordinatorMessage,
    ExitReason,
    Hello,
    Join,
    Left,
    StepDone,
    body_text,
)
from tidewheel.elastic.node_connection import NodeConnection
from tidewheel.elastic.node_messages import Beats, Gone, line
from tidewheel.elastic.sessions import Sessions
from tidewheel.elastic.supervision import Supervisor
from tidewheel.train.elastic_config import ElasticConfig
from tidewheel.train.node_checks_config import NodeChecksConfig

PATIENCE = 3600.0
"""Time limit of heartbeats and reports in seconds: nobody is late, however busy the machine is."""
LEFT = Left(0, ExitReason.FAILED, "RuntimeError: connection closed by peer")
TICKS = 10
"""Ticks of the coordinator in a second."""


class Lines:
    """Takes the place of the socket of a node's connection: keeps what the coordinator sends."""

    def __init__(self) -> None:
        self._sent: list[bytes] = []

    def is_closing(self) -> bool:
        """Return False: the connection is open."""
        return False

    def write(self, data: bytes) -> None:
        """Keep lines."""
        self._sent.append(data)

    def take(self) -> list[dict[str, Any]]:
        """Return the lines since the last call."""
        lines = b"".join(self._sent).splitlines()
        self._sent = []
        return [json.loads(text) for text in lines]


class SocketlessServer:
    """Takes the place of the coordinator's server.

    Args:
        sessions: the sessions of all workers.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function."""
        return function()

    def send_all(self, names: list[str], message: CoordinatorMessage) -> None:
        """Send a message to several workers."""
        self._sessions.send_all(names, message)

    def join(self, members: Mapping[str, int], order: Join) -> None:
        """Tell workers to join a generation."""
        self._sessions.send_all(members, order, members.values())

    def unheard(self, name: str) -> float:
        """Return how long a worker has acknowledged no message."""
        return self._sessions.unheard(name)

    def cut(self, name: str) -> None:
        """End a worker's session."""
        self._sessions.cut(name)

    def stop(self) -> None:
        """Do nothing: there is no thread."""


class Measurement:
    """One number of workers. Each stage is timed by the CPU clock of this thread.

    Args:
        workers: their number.
        profile: also profile the stages from a death until the joins.
    """

    def __init__(self, workers: int, profile: cProfile.Profile | None) -> None:
        self.row: dict[str, str] = {"workers": f"{workers:,}"}
        self._workers = workers
        self._profile = profile
        self._coordinator = MeasuredCoordinator(tempfile.mkdtemp(), workers, elastic=ElasticConfig(
            max_workers=workers, heartbeat_seconds=PATIENCE, leave_seconds=PATIENCE,
            node_checks=NodeChecksConfig(failures=0)))
        supervisor = Supervisor(self._coordinator.event)
        sessions = Sessions(self._coordinator._dispatcher, supervisor, asyncio.get_running_loop())
        self._coordinator._dispatcher.server = SocketlessServer(sessions)  # type: ignore[assignment]
        self._coordinator._up.set()
        self._lines = [Lines() for _ in range(workers // RANKS_A_NODE)]
        self._nodes = [NodeConnection(lines, sessions, supervisor) for lines in self._lines]  # type: ignore[arg-type]

    async def run(self) -> dict[str, str]:
        """Return the seconds of each stage."""
        names = {f"w{index:05d}": f"n{index // RANKS_A_NODE:05d}" for index in range(self._workers)}
        self._coordinator.expect(names, anew=True)
        agents = self._coordinator._agents.supervisor
        assert agents is not None
        while not all(agents.has(node) for node in names.values()):
            await asyncio.sleep(0.01)
        await self._stage("start", self._start)
        sent = [lines.take() for lines in self._lines]
        assert sum(len(orders[-1]["ranks"]) for orders in sent) == self._workers, "not all have joined"
        beats = tuple((worker, sent[0][-1]["number"], 0, 0, 0.0, -1) for worker in range(RANKS_A_NODE))
        await self._stage("a beat of each", lambda: self._say_all(line(body_text(Beats(beats)), [])))
        await self._stage("a second's ticks", lambda: [self._coordinator._dispatcher.tick() for _ in range(TICKS)])
        self._nodes[0]._receive(line(body_text(StepDone(0, 1, 100, {})), [(0, None, 0)]))
        if self._profile is not None:
            self._profile.enable()
        total = await self._stage("a death, aborts", lambda: self._nodes[-1]._receive(
            line(body_text(Gone()), [(RANKS_A_NODE - 1, None, 0)])))
        aborts = [lines.take() for lines in self._lines]
        kinds = [[order["body"]["type"] for order in orders] for orders in aborts]
        assert kinds == [["abort"]] * len(kinds), "not one line for each node"
        everybody = [(worker, 1, sent[0][-1]["number"] + 1) for worker in range(RANKS_A_NODE)]
        total += await self._stage("reports, joins", lambda: self._say_all(line(body_text(LEFT), everybody)))
        if self._profile is not None:
            self._profile.disable()
        joins = [lines.take() for lines in self._lines]
        assert all(len(orders) == 1 for orders in joins), "more than one line for a node"
        ranks = [rank for [order] in joins for rank in order["ranks"]]
        assert ranks == list(range(self._workers - 1)), "the ranks are wrong"
        self._coordinator.end()
        return {**self.row, "death until joins": f"{total:.3f}"}

    async def _stage(self, name: str, work: Callable[[], Any]) -> float:
        """Return the CPU seconds of some work and of what the coordinator sends after it."""
        began = time.thread_time()
        work()
        await asyncio.sleep(0)  # the lines to the nodes go out in the next turn of the event loop
        await asyncio.sleep(0)
        seconds = time.thread_time() - began
        self.row[name] = f"{seconds:.3f}"
        return seconds

    def _start(self) -> None:
        names = iter(range(self._workers))
        for number, node in enumerate(self._nodes):
            for worker in range(RANKS_A_NODE):
                hello = Hello(f"w{next(names):05d}", f"n{number:05d}", "")
                node._receive(line(body_text(hello), [(worker, None, 0)]))

    def _say_all(self, text: bytes) -> None:
        for node in self._nodes:
            node._receive(text)


async def measure(workers: int, profile: cProfile.Profile | None = None) -> dict[str, str]:
    """Return the seconds of each stage with this many workers; see `Measurement`."""
    return await Measurement(workers, profile).run()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--workers", type=int, nargs="+", default=[1024, 4096, 16384], help="multiples of eight")
    options.add_argument("--profile", action="store_true", help="print where the time after a death goes")
    given = options.parse_args()
    rows = []
    for workers in given.workers:
        profile = cProfile.Profile() if given.profile else None
        rows.append(asyncio.run(measure(workers, profile)))
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    print_table(rows, title="CPU seconds of the coordinator")
    return 0


if __name__ == "__main__":
    sys.exit(main())
