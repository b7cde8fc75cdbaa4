"""Workers of `control_plane` without torch: connections that speak the real protocol, many in one process.

Each connection says hello, beats as often as a worker, joins generations, leaves when its generation is aborted, dies
or freezes. The parent process sends commands as JSON lines to the standard input and reads reports from the output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from tidewheel.elastic.messages import (
    BEAT_SECONDS,
    Beat,
    ExitReason,
    FromWorker,
    Hello,
    Left,
    StepDone,
    WorkerMessage,
    encode,
)

CONNECT_AT_ONCE = 100
"""Connections that a process opens at the same time; a listening socket holds back this many."""


@dataclass
class Totals:
    """What this process has received from the coordinator."""

    frames: int = 0
    bytes: int = 0
    aborts: int = 0
    cut: int = 0
    """Connections that the coordinator closed while their worker was alive and responsive."""
    refused: int = 0
    """Those of them that it closed before it had accepted the worker."""


@dataclass
class Round:
    """The workers of this process that have joined one generation."""

    ranks: list[int] = field(default_factory=list)
    world_size: int = 0
    last: float = 0.0


class Worker(asyncio.Protocol):
    """One worker's connection.

    Args:
        name: its name.
        node: id of its node.
        clients: all workers of the process.
    """

    def __init__(self, name: str, node: str, clients: Clients) -> None:
        self.name = name
        self.node = node
        self.generation = -1
        self.left = True
        self.dead = False
        self.frozen = False
        self._clients = clients
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._sent = 0
        self._received = 0
        self._welcome = 0
        self._aborted = -1
        self._beat: tuple[tuple[int, int, int], bytes] = ((-1, -1, -1), b"")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(encode(FromWorker(Hello(self.name, self.node, self._clients.token))))

    def data_received(self, data: bytes) -> None:
        self._clients.totals.bytes += len(data)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._clients.totals.frames += 1
            frame = json.loads(line)
            self._received = max(self._received, frame["number"] or 0)
            if not self.dead and not self.frozen:
                self._act(frame["body"])

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self.dead and not self.frozen:
            self._clients.totals.cut += 1
            self._clients.totals.refused += self._welcome == 0
        self.dead = True

    def beat(self) -> None:
        """Send a heartbeat. Its line is kept: the clients' own time is not what is measured."""
        state = (self.generation, self._aborted, self._received)
        if self._beat[0] != state:
            message = Beat(self.generation, 1, 0.0, self._aborted)
            self._beat = (state, encode(FromWorker(message, received=self._received)))
        if self._transport is not None:
            self._transport.write(self._beat[1])

    def die(self) -> None:
        """Close the connection, as the kernel does for a killed process."""
        self.dead = True
        if self._transport is not None:
            self._transport.abort()

    def _act(self, body: dict[str, Any]) -> None:
        if body["type"] == "welcome":
            self._welcome += 1
        elif body["type"] == "join":
            self.generation = body["generation"]
            self.left = False
            if body["rank"] == 0:
                self._send(StepDone(self.generation, 1, 1_000_000, {}))
            self._clients.joined(self, body)
        elif body["type"] == "abort":
            self._clients.totals.aborts += 1
            self._aborted = max(self._aborted, body["generation"])
            if self.generation <= self._aborted and not self.left:
                self.left = True
                self._send(Left(self.generation, ExitReason.FAILED, "RuntimeError: connection closed by peer"))

    def _send(self, message: WorkerMessage) -> None:
        self._sent += 1
        if self._transport is not None:
            self._transport.write(encode(FromWorker(message, self._sent, self._received)))


class Clients:
    """The workers of this process.

    Args:
        token: the run's token.
        names: node by worker.
        beat: seconds between two beats; 0 for what the coordinator says.
    """

    def __init__(self, token: str, names: dict[str, str], beat: float) -> None:
        self.token = token
        self.totals = Totals()
        self.workers = {name: Worker(name, node, self) for name, node in names.items()}
        self._beat = beat or BEAT_SECONDS
        self._keep_beat = bool(beat)
        self._rounds: dict[int, Round] = {}

    def joined(self, worker: Worker, body: dict[str, Any]) -> None:
        """Note that a worker has joined a generation; tell the parent when all that live have."""
        one = self._rounds.setdefault(body["generation"], Round())
        one.ranks.append(body["rank"])
        one.world_size = body["world_size"]
        one.last = time.monotonic()
        if not self._keep_beat:
            self._beat = body["beat_seconds"]
        alive = [other for other in self.workers.values() if not other.dead and not other.frozen]
        if len(one.ranks) >= len(alive) and all(other.generation == body["generation"] for other in alive):
            say({"joined": body["generation"], "at": one.last, "world_size": one.world_size,
                 "ranks": len(one.ranks), "sum": sum(one.ranks)})

    async def connect(self, host: str, port: int) -> None:
        """Connect all workers."""
        loop = asyncio.get_running_loop()
        gate = asyncio.Semaphore(CONNECT_AT_ONCE)

        async def one(worker: Worker) -> None:
            async with gate:
                await loop.create_connection(lambda: worker, host, port)

        await asyncio.gather(*(one(worker) for worker in self.workers.values()))
        say({"connected": len(self.workers)})

    async def beats(self) -> None:
        """Let each worker beat, evenly spread over the interval."""
        while True:
            began = time.monotonic()
            workers = [worker for worker in self.workers.values() if not worker.dead and not worker.frozen]
            for index, worker in enumerate(workers):
                worker.beat()
                ahead = began + self._beat * index / len(workers) - time.monotonic()
                if ahead > 0.005:
                    await asyncio.sleep(ahead)
            await asyncio.sleep(max(0.0, began + self._beat - time.monotonic()))

    def obey(self, command: dict[str, Any]) -> None:
        """Act on a command of the parent."""
        for name in command.get("die", ()):
            if name in self.workers:
                self.workers[name].die()
        for name in command.get("freeze", ()):
            if name in self.workers:
                self.workers[name].frozen = True
        if command.get("report"):
            say({"report": vars(self.totals)})


def say(report: dict[str, Any]) -> None:
    """Write a line for the parent."""
    print(json.dumps(report), flush=True)


async def run(clients: Clients, host: str, port: int) -> None:
    """Connect, then obey commands until the parent closes the input."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    beating = loop.create_task(clients.beats())
    await clients.connect(host, port)
    while line := await reader.readline():
        clients.obey(json.loads(line))
    beating.cancel()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("host")
    options.add_argument("port", type=int)
    options.add_argument("--beat", type=float, default=0.0)
    given = options.parse_args()
    setup = json.loads(sys.stdin.readline())
    clients = Clients(setup["token"], setup["names"], given.beat)
    asyncio.run(run(clients, given.host, given.port))


if __name__ == "__main__":
    main()
