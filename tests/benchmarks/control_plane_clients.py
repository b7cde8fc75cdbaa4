"""Workers of `control_plane` without torch: connections that speak the real protocol, many in one process.

With `--relays` the workers of a node share a connection, as they do through the node's relay.
Each connection says hello, beats as often as a worker, joins generations, leaves when its generation is aborted, dies
or freezes. The parent process sends commands as JSON lines to the standard input and reads reports from the output.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
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
    NodeHello,
    StepDone,
    WorkerMessage,
    body_text,
    encode,
)
from tidewheel.elastic.node_messages import Beats, Gone, line
from tidewheel.elastic.node_relay import Uplink

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


@functools.lru_cache(maxsize=64)
def left_text(report: Left) -> str:
    """Return the JSON of a report, which is the same for many workers."""
    return body_text(report)


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
        self._transport: asyncio.Transport | Relayed | None = None
        self._buffer = b""
        self._sent = 0
        self._received = 0
        self._welcome = 0
        self._aborted = -1
        self._beat: tuple[tuple[int, int, int], bytes] = ((-1, -1, -1), b"")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport | Relayed)
        self._transport = transport
        self._write(FromWorker(Hello(self.name, self.node, self._clients.token)))

    def data_received(self, data: bytes) -> None:
        self._clients.totals.bytes += len(data)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for text in lines:
            self._clients.totals.frames += 1
            frame = json.loads(text)
            self.take(frame["number"], frame["body"])

    def take(self, number: int | None, body: dict[str, Any]) -> None:
        """Act on a message of the coordinator."""
        self._received = max(self._received, number or 0)
        if not self.dead and not self.frozen:
            self._act(body)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self.dead and not self.frozen:
            self._clients.totals.cut += 1
            self._clients.totals.refused += self._welcome == 0
            self._clients.alive -= 1
        self.dead = True

    def row(self, number: int) -> tuple[int, int, int, int, float, int]:
        """Return a heartbeat as a relay sends it."""
        return (number, self._received, self.generation, 1, 0.0, self._aborted)

    def beat(self) -> None:
        """Send a heartbeat. Its line is kept: the clients' own time is not what is measured."""
        state = (self.generation, self._aborted, self._received)
        if self._beat[0] != state:
            message = Beat(self.generation, 1, 0.0, self._aborted)
            self._beat = (state, encode(FromWorker(message, received=self._received)))
        if isinstance(self._transport, asyncio.Transport):
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
                if self._clients.spread:
                    asyncio.get_running_loop().call_later(random.uniform(0, self._clients.spread), self._report)
                else:
                    self._report()

    def _report(self) -> None:
        """Say that it has left its generation."""
        if not self.dead and not self.frozen:
            self._send(Left(self.generation, ExitReason.FAILED, "RuntimeError: connection closed by peer"))

    def _send(self, message: WorkerMessage) -> None:
        self._sent += 1
        self._write(FromWorker(message, self._sent, self._received))

    def _write(self, frame: FromWorker) -> None:
        if isinstance(self._transport, Relayed):
            self._transport.send(frame)
        elif self._transport is not None:
            self._transport.write(encode(frame))


class Relayed(asyncio.BaseTransport):
    """A worker's connection through its node's relay.

    Args:
        node: the relay's connection.
        number: of the worker's connection.
    """

    def __init__(self, node: NodeLink, number: int) -> None:
        super().__init__()
        self._node = node
        self._number = number

    def send(self, frame: FromWorker) -> None:
        """Send a frame. Its JSON is made once for all workers, and not parsed again as a relay does on its own node."""
        text = left_text(frame.body) if isinstance(frame.body, Left) else body_text(frame.body)
        self._node.uplink.put(self._number, text, frame.number, frame.received)

    def abort(self) -> None:
        """Close the connection."""
        self._node.uplink.put(self._number, body_text(Gone()), None, 0)


class NodeLink(asyncio.Protocol):
    """A relay's connection to the coordinator, with the workers of its node.

    Args:
        node: id of the node.
        workers: its workers.
        clients: all workers of the process.
    """

    def __init__(self, node: str, workers: list[Worker], clients: Clients) -> None:
        self.uplink = Uplink(self._write)
        self.node = node
        self._workers = workers
        self._clients = clients
        self._transport: asyncio.Transport | None = None
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(encode(FromWorker(NodeHello(self.node, self._clients.token))))
        for number, worker in enumerate(self._workers):
            worker.connection_made(Relayed(self, number))

    def data_received(self, data: bytes) -> None:
        self._clients.totals.bytes += len(data)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for text in lines:
            self._clients.totals.frames += 1
            values = json.loads(text)
            body, number = values["body"], values["number"]
            for index, worker in enumerate(values["workers"]):
                if body["type"] == "drop":
                    self._workers[worker].connection_lost(None)
                elif body["type"] == "join":
                    self._workers[worker].take(number, {**body, "rank": values["ranks"][index]})
                else:
                    self._workers[worker].take(number, body)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        for worker in self._workers:
            worker.connection_lost(error)

    def beat(self) -> None:
        """Send the heartbeats of the node's workers."""
        rows = [worker.row(number) for number, worker in enumerate(self._workers)
                if not worker.dead and not worker.frozen]
        if rows:
            self._write(line(body_text(Beats(tuple(rows))), []))

    def die(self) -> None:
        """Close the connection, as the kernel does when the relay's process is killed with those of its workers."""
        for worker in self._workers:
            self._clients.alive -= not worker.dead and not worker.frozen
            worker.dead = True
        if self._transport is not None:
            self._transport.abort()

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


class Clients:
    """The workers of this process.

    Args:
        token: the run's token.
        names: node by worker.
        beat: seconds between two beats; 0 for what the coordinator says.
        relays: the workers of a node share a connection.
        spread: workers leave a generation after a random time of at most so many seconds, not all at once.
    """

    def __init__(self, token: str, names: dict[str, str], beat: float, *, relays: bool = False,
                 spread: float = 0.0) -> None:
        self.token = token
        self.spread = spread
        self.totals = Totals()
        self.workers = {name: Worker(name, node, self) for name, node in names.items()}
        self.alive = len(names)
        """Workers that neither died nor froze."""
        self.links: list[NodeLink] = []
        if relays:
            by_node: dict[str, list[Worker]] = {}
            for worker in self.workers.values():
                by_node.setdefault(worker.node, []).append(worker)
            self.links = [NodeLink(node, workers, self) for node, workers in by_node.items()]
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
        if len(one.ranks) < self.alive:
            return
        alive = [other for other in self.workers.values() if not other.dead and not other.frozen]
        if all(other.generation == body["generation"] for other in alive):
            say({"joined": body["generation"], "at": one.last, "world_size": one.world_size,
                 "ranks": len(one.ranks), "sum": sum(one.ranks)})

    async def connect(self, host: str, port: int) -> None:
        """Connect all workers."""
        loop = asyncio.get_running_loop()
        gate = asyncio.Semaphore(CONNECT_AT_ONCE)

        async def one(end: Worker | NodeLink) -> None:
            async with gate:
                await loop.create_connection(lambda: end, host, port)

        await asyncio.gather(*(one(end) for end in self.links or self.workers.values()))
        say({"connected": len(self.workers)})

    async def beats(self) -> None:
        """Let each worker beat, evenly spread over the interval."""
        while True:
            began = time.monotonic()
            ends: list[Worker] | list[NodeLink] = self.links or [
                worker for worker in self.workers.values() if not worker.dead and not worker.frozen]
            for index, end in enumerate(ends):
                end.beat()
                ahead = began + self._beat * index / len(ends) - time.monotonic()
                if ahead > 0.005:
                    await asyncio.sleep(ahead)
            await asyncio.sleep(max(0.0, began + self._beat - time.monotonic()))

    def obey(self, command: dict[str, Any]) -> None:
        """Act on a command of the parent."""
        for name in command.get("die", ()):
            if name in self.workers:
                self.alive -= 1
                self.workers[name].die()
        for link in self.links:  # a node that dies closes its relay's connection, and nothing is said of its workers
            if link.node in command.get("lose", ()):
                link.die()
        for name in command.get("freeze", ()):
            if name in self.workers:
                self.alive -= 1
                self.workers[name].frozen = True
        if command.get("report"):
            say({"report": {**vars(self.totals), "cpu": time.process_time()}})


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
    options.add_argument("--relays", action="store_true")
    options.add_argument("--spread", type=float, default=0.0)
    given = options.parse_args()
    setup = json.loads(sys.stdin.readline())
    clients = Clients(setup["token"], setup["names"], given.beat, relays=given.relays, spread=given.spread)
    asyncio.run(run(clients, given.host, given.port))


if __name__ == "__main__":
    main()
