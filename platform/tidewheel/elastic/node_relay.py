"""A node's relay: the node's workers connect to it, and it has one connection to the coordinator for all of them.

So the coordinator has a connection, a line of heartbeats and an order to abort for each node instead of each worker.
The relay decides nothing and keeps nothing: sessions are between worker and coordinator. If it ends, the workers lose
their connections and return to the coordinator directly. While the coordinator does not answer, it asks storage for all
its workers whether the run has another owner (`owner_watch`), and tells them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable

from tidewheel.elastic.client import REFUSED_SECONDS, RETRY_SECONDS
from tidewheel.elastic.connection import MOST_BYTES, RECONNECT_SECONDS, Endpoint, next_line, tune
from tidewheel.elastic.listener import Listener
from tidewheel.elastic.messages import (
    BEAT_SECONDS,
    FromCoordinator,
    FromWorker,
    Greeting,
    Hello,
    NodeHello,
    Received,
    Return,
    TakenOver,
    body_text,
    encode,
    frame_line,
)
from tidewheel.elastic.node_messages import Beats, Gone, Groups, line, split
from tidewheel.elastic.outgoing import with_rank
from tidewheel.elastic.owner_watch import OwnerWatch
from tidewheel.unauthenticated import HELLO_BYTES

logger = logging.getLogger(__name__)

ALIVE_SECONDS = 0.1
"""Time between two signs of life that each worker gets. A worker that gets none leaves the relay, see `client`."""
ALIVE = encode(FromCoordinator(Received()))
GATHER_SECONDS = 0.001
"""Lines of workers wait this long for others with the same body."""
BACKLOG = 256
DISMISSED_SECONDS = 1.0
"""A relay whose workers must end stays this long, so that they read why."""


class Uplink:
    """What the workers of a node send, on its way to the coordinator.

    Args:
        write: sends bytes.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.beat_seconds = BEAT_SECONDS
        self._write = write
        self._groups = Groups()
        self._beats: dict[int, tuple[int, int, int, int, float, int]] = {}

    def add(self, worker: int, text: bytes) -> None:
        """Take a line of a worker. A heartbeat waits for the next line of heartbeats, and replaces an earlier one.

        Args:
            worker: number of its connection.
            text: the line.

        Raises:
            ValueError: it is not a frame.
        """
        body, frame = split(text)
        values = frame["body"]
        received = int(frame.get("received", 0))
        if values.get("type") == "beat":
            self._beats[worker] = (worker, received, int(values["generation"]), int(values["step"]),
                                   float(values.get("work", 0.0)), int(values.get("aborts", -1)))
        else:
            self.put(worker, body, frame.get("number"), received)

    def put(self, worker: int, body: str, number: int | None, received: int) -> None:
        """Take a frame of a worker.

        Args:
            worker: number of its connection.
            body: the body as JSON.
            number: sequence number.
            received: acknowledgement.
        """
        if not self._groups:
            asyncio.get_running_loop().call_later(GATHER_SECONDS, self.flush)
        self._groups.add(body, worker, number, received)

    def flush(self) -> None:
        """Send all frames but heartbeats."""
        groups = self._groups.take()
        if groups:
            self._write(b"".join(line(body, workers) for body, workers in groups))

    def send_beats(self) -> None:
        """Send the heartbeats since the last call."""
        if self._beats:
            rows = tuple(self._beats.values())
            self._beats = {}
            self._write(line(body_text(Beats(rows)), []))

    def forget(self, worker: int) -> None:
        """Drop the heartbeat of a worker that is gone."""
        self._beats.pop(worker, None)


class NodeRelay(Listener):
    """The relay of one node, in a thread of its own.

    Args:
        host: address of the node, at which its workers connect.
        endpoint: where the coordinator listens.
        node: id of the node.
        on_closed: called in the relay's thread when it ends by itself: the coordinator is gone, or could not be
            reached for `connection.RECONNECT_SECONDS`. Then the workers find nobody at its address.
    """

    def __init__(self, host: str, endpoint: Endpoint, node: str, on_closed: Callable[[], None]) -> None:
        super().__init__(host, endpoint.token, thread="relay", kinds=(Hello, Return), backlog=BACKLOG)
        self._endpoint = endpoint
        self._node = node
        self._on_closed = on_closed
        self._numbers = itertools.count()
        self._workers: dict[int, asyncio.StreamWriter] = {}
        self._present: set[asyncio.StreamWriter] = set()  # also workers that wait until the relay is connected
        self._coordinator: asyncio.StreamWriter | None = None
        self._connected = asyncio.Event()
        self._uplink = Uplink(self._write)
        self._waits_since: float | None = None  # monotonic time of the first line since the coordinator's last one
        self._owner_watch: OwnerWatch | None = None
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    @property
    def runs(self) -> bool:
        """Whether workers can connect."""
        return self._thread.is_alive()

    def dismiss(self, reason: str) -> None:
        """Tell the workers to end, and end a moment later: another driver owns the run. Any thread may call it."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._dismiss, reason)

    def _begin(self) -> None:
        self._owner_watch = OwnerWatch(self._endpoint, self._unanswered, self.dismiss,
                                           represented=lambda: len(self._present))
        connecting = self._loop.create_task(self._stay_connected())
        connecting.add_done_callback(lambda _: self._stopped.set())
        self._tasks = (connecting, self._loop.create_task(self._beat()), self._loop.create_task(self._say_alive()))

    def _end(self) -> None:
        if self._owner_watch is not None:
            self._owner_watch.close()
        self._drop_all()
        if self._tasks[0].done():
            self._on_closed()

    # -- the coordinator ---------------------------------------------------------------------------
    async def _stay_connected(self) -> None:
        """Keep a connection to the coordinator; return when that is hopeless, or a line is longer than `MOST_BYTES`."""
        answered = broke = time.monotonic()
        pause = 0.05
        while time.monotonic() - broke < RECONNECT_SECONDS and time.monotonic() - answered < REFUSED_SECONDS:
            try:
                async with asyncio.timeout(RETRY_SECONDS):
                    reader, writer = await asyncio.open_connection(*self._endpoint.address, limit=HELLO_BYTES)
            except (OSError, TimeoutError) as error:
                if not isinstance(error, ConnectionRefusedError):
                    answered = time.monotonic()
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_SECONDS / 2)
                continue
            try:
                await self._listen(reader, writer)
            except OSError as error:
                logger.info("the connection to the coordinator broke: %s", error)
            except ValueError as error:  # it would be sent again and again; workers read it without a relay
                logger.warning("the relay ends, and its workers connect to the coordinator directly: %s", error)
                return
            finally:
                writer.transport.abort()
            self._coordinator = None
            self._connected.clear()
            self._drop_all()  # they return when the relay is connected again
            answered = broke = time.monotonic()
            pause = 0.05

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tune(writer.get_extra_info("socket"))
        hello = NodeHello(self._node, self._endpoint.token)
        writer.write(encode(FromWorker(hello)))
        self._coordinator = writer
        self._connected.set()
        while text := await next_line(reader, MOST_BYTES):
            self._waits_since = None
            try:
                self._distribute(text)
            except (ValueError, TypeError, KeyError, IndexError):
                logger.exception("a line of the coordinator was ignored")

    def _distribute(self, text: bytes) -> None:
        """Pass on a line of the coordinator to the workers that it is for."""
        body, values = split(text)
        ranks: list[int] = values.get("ranks") or []
        shared = b"" if ranks else frame_line(body, values["number"], values["received"])
        if values["body"].get("type") == "join":
            self._uplink.beat_seconds = float(values["body"]["beat_seconds"])
        for index, worker in enumerate(values["workers"]):
            writer = self._workers.get(worker)
            if writer is None:
                continue
            if values["body"].get("type") == "drop":
                writer.transport.abort()
            else:
                writer.write(shared or frame_line(with_rank(body, ranks[index]), values["number"], values["received"]))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._uplink.beat_seconds)
            self._uplink.send_beats()

    async def _say_alive(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_SECONDS)
            for writer in self._present:
                writer.write(ALIVE)

    def _unanswered(self) -> float:
        """Return the seconds since the first line that the coordinator has not answered; 0.0 without workers."""
        since = self._waits_since
        return 0.0 if since is None or not self._present else time.monotonic() - since

    def _write(self, data: bytes) -> None:
        if self._waits_since is None:
            self._waits_since = time.monotonic()
        if self._coordinator is not None and not self._coordinator.is_closing():
            self._coordinator.write(data)

    # -- the workers -------------------------------------------------------------------------------
    async def _serve(self, greeting: Greeting, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker = -1
        self._present.add(writer)
        try:
            while not self._connected.is_set():  # it may break again before this task goes on
                await self._connected.wait()
            worker = next(self._numbers)
            self._workers[worker] = writer
            self._uplink.put(worker, body_text(greeting), None, 0)
            while await self._next(worker, reader):
                pass
        except OSError as error:
            logger.info("the connection of a worker broke: %s", error)
        finally:
            self._present.discard(writer)
            if self._workers.pop(worker, None) is not None:
                self._uplink.forget(worker)
                self._uplink.put(worker, body_text(Gone()), None, 0)

    async def _next(self, worker: int, reader: asyncio.StreamReader) -> bool:
        """Take the next line of a worker; return False at the end of its connection."""
        try:
            text = await next_line(reader, MOST_BYTES, skip=True)
            if text:
                self._uplink.add(worker, text)
            return bool(text)
        except (ValueError, TypeError, KeyError):  # keep reading: the worker's other messages count
            logger.exception("a line of a worker was ignored")
            return True

    def _dismiss(self, reason: str) -> None:
        logger.warning("the workers of this node end: %s", reason)
        for writer in self._present:
            writer.write(encode(FromCoordinator(TakenOver(reason))))
        self._loop.call_later(DISMISSED_SECONDS, self._stopped.set)

    def _drop_all(self) -> None:
        workers, self._workers = self._workers, {}
        for writer in workers.values():
            writer.transport.abort()
