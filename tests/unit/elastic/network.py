"""A TCP proxy that stands in for a bad network: delay, loss, a slow link, one-way partitions, outages and resets.

    with network(coordinator_address) as link:
        worker connects to link.address
        link.up.held = True         # the worker hears the coordinator, which does not hear the worker
        link.down.delay = 0.5       # seconds
        link.down.bytes_per_second = 1000

One proxy in front of each worker gives each of them a network of its own. It needs no privileges. What it cannot do is
make the kernel time a connection out: its own end acknowledges everything, as a router's buffer never does.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER value with which closing sends a reset and drops data in flight."""
CHUNK = 1 << 14
RESENT_SECONDS = 0.2
"""TCP sends a lost packet again after this time, twice as late each further time."""
LOOK_SECONDS = 0.01
TOKEN = "secret"
"""Of the coordinators behind networks and relays."""
PIECES_A_SECOND = 20
"""A slow link delivers this many pieces a second."""


@dataclass
class Way:
    """One direction of a network. A test may change the fields at any time, from any thread."""

    delay: float = 0.0
    """Seconds from sending to arrival."""
    loss: float = 0.0
    """Share of the packets that are lost and sent again; what follows waits for them."""
    bytes_per_second: float = math.inf
    held: bool = False
    """Let nothing arrive. What is sent meanwhile arrives afterwards, also the end of a connection."""
    delivered: int = 0
    """Bytes that have arrived."""
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def seconds(self) -> float:
        """Return how long the next packet is under way."""
        late = 0.0
        pause = RESENT_SECONDS
        while self.chance.random() < self.loss:
            late += pause
            pause *= 2
        return self.delay + late


@dataclass(eq=False)
class Pair:
    """A client's connection and the one to the target that belongs to it."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def cancel(self) -> None:
        """Forward nothing more."""
        for task in self.tasks:
            task.cancel()


class Network:
    """A proxy that forwards connections to `target`, with a thread of its own.

    Args:
        target: host and port of a server.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.up = Way()
        """From the clients to the server."""
        self.down = Way()
        """From the server to the clients."""
        self._target = target
        self._pairs: set[Pair] = set()
        self._lost: list[Pair] = []
        self._there = threading.Event()
        self._there.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0, limit=CHUNK, backlog=128))
        self.address: tuple[str, int] = ("127.0.0.1", self._server.sockets[0].getsockname()[1])

    def away(self) -> None:
        """Let nothing through from now on.

        The clients' connections time out. The coordinator receives nothing, as if packets were dropped. New
        connections are accepted and not answered.
        """
        self._there.clear()
        self._call(self._away())

    def back(self) -> None:
        """Forward new connections again."""
        self._there.set()

    def reset(self) -> None:
        """Reset all connections on both sides, as a firewall does that has forgotten them."""
        self._call(self._reset())

    def close(self) -> None:
        """Stop listening and reset all connections."""
        if not self._thread.is_alive():
            return
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _away(self) -> None:
        pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            pair.cancel()
            self._lost.append(pair)
            _reset(pair.client)

    async def _reset(self) -> None:
        pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            pair.cancel()
            _reset(pair.client)
            _reset(pair.server)

    async def _close(self) -> None:
        self._server.close()
        await self._reset()
        for pair in self._lost:
            _reset(pair.server)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the transports close their sockets in the next round

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        try:
            while not self._there.is_set():
                await asyncio.sleep(LOOK_SECONDS)
            answers, server = await asyncio.open_connection(*self._target, limit=CHUNK)
        except (OSError, asyncio.CancelledError):
            _reset(client)
            return
        for writer in (client, server):
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pair = Pair(client, server)
        self._pairs.add(pair)
        pair.tasks = [self._loop.create_task(self._forward(pair, self.up, reader, server)),
                      self._loop.create_task(self._forward(pair, self.down, answers, client))]

    async def _forward(self, pair: Pair, way: Way, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Forward one direction until its end arrives, then close both sides as it was closed."""
        under_way: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue(maxsize=1000)
        reading = self._loop.create_task(self._read(way, source, under_way))
        reset = False
        try:
            while True:
                due, data = await under_way.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                await _while_held(way)
                if not data:
                    reset = data is None
                    break
                await _deliver(way, data, sink)
        except ConnectionError:  # the receiver is gone
            reset = True
        finally:
            reading.cancel()
        if pair in self._pairs:
            self._pairs.discard(pair)
            for writer in (pair.client, pair.server):
                if reset:
                    _reset(writer)
                else:
                    writer.close()

    async def _read(self, way: Way, source: asyncio.StreamReader,
                    under_way: asyncio.Queue[tuple[float, bytes | None]]) -> None:
        data: bytes | None = b" "
        while data:
            try:
                data = await source.read(CHUNK)
            except ConnectionError:
                data = None
            await under_way.put((self._loop.time() + way.seconds(), data))


async def _while_held(way: Way) -> None:
    while way.held:
        await asyncio.sleep(LOOK_SECONDS)


async def _deliver(way: Way, data: bytes, sink: asyncio.StreamWriter) -> None:
    """Write data at the speed of the link."""
    while data:
        await _while_held(way)
        size = len(data)
        if way.bytes_per_second < math.inf:
            size = max(1, int(way.bytes_per_second / PIECES_A_SECOND))
        piece, data = data[:size], data[size:]
        sink.write(piece)
        await sink.drain()
        way.delivered += len(piece)
        if way.bytes_per_second < math.inf:
            await asyncio.sleep(len(piece) / way.bytes_per_second)


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()


@contextlib.contextmanager
def network(target: tuple[str, int]) -> Iterator[Network]:
    """Yield a network in front of `target` while the block runs."""
    proxy = Network(target)
    try:
        yield proxy
    finally:
        proxy.close()
