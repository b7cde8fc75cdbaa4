"""The coordinator's end of a relay's connection, which carries the connections of a node's workers."""

from __future__ import annotations

import asyncio
import time

from tidewheel.elastic.connection import ANSWER_SECONDS, MOST_BYTES, RECONNECT_SECONDS, RESET_SECONDS, next_line
from tidewheel.elastic.messages import Beat, End, Hello, Here, Received, Return
from tidewheel.elastic.node_messages import Beats, Drop, FromNode, Gone, Orders, decode_from_node, line_to_node
from tidewheel.elastic.outgoing import ANY_RANK, Outgoing
from tidewheel.elastic.sessions import Session, Sessions
from tidewheel.elastic.supervision import Supervisor


class Relayed:
    """A worker's connection through its node's relay.

    Args:
        node: the relay's connection.
        number: of the worker's connection at the relay.
    """

    def __init__(self, node: NodeConnection, number: int) -> None:
        self.session: Session | None = None
        self.returning: Return | None = None
        """What it asked for, until it has answered the welcome."""
        self._node = node
        self._number = number

    def send(self, frame: Outgoing, rank: int = ANY_RANK) -> None:
        """Send a frame."""
        self._node.send(self._number, frame, rank)

    def close(self) -> None:
        """Close the connection."""
        self._node.drop(self._number)


class NodeConnection:
    """A relay's connection. What the coordinator sends at one moment to several workers of the node is one line.

    Args:
        writer: its end here.
        sessions: the sessions of all workers.
        supervisor: reports errors.
    """

    def __init__(self, writer: asyncio.StreamWriter, sessions: Sessions, supervisor: Supervisor) -> None:
        self._writer = writer
        self._sessions = sessions
        self._supervisor = supervisor
        self._workers: dict[int, Relayed] = {}
        self._orders = Orders()
        self._answered_at = 0.0
        self._loop = asyncio.get_running_loop()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Act on the relay's lines until its connection ends.

        Then the workers have a second to return, directly or through a new relay, or as long as any worker if the
        network failed.
        """
        grace = RESET_SECONDS
        try:
            while await self._next(reader):
                pass
        except OSError as error:
            if not isinstance(error, ConnectionError):
                grace = RECONNECT_SECONDS
        except asyncio.CancelledError:
            self._workers.clear()  # the server stops: report nothing as closed
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            self._break(worker, grace)

    def send(self, number: int, frame: Outgoing, rank: int = ANY_RANK) -> None:
        """Send a frame to a worker.

        Args:
            number: of the worker's connection.
            frame: the frame.
            rank: its rank, if the body is a `Join`.
        """
        if number in self._workers:
            if not self._orders:
                self._loop.call_soon(self._flush)
            self._orders.add(number, frame, rank)

    def drop(self, number: int) -> None:
        """Close the connection of a worker."""
        self.send(number, Outgoing(Drop()))
        self._workers.pop(number, None)

    def _flush(self) -> None:
        lines = self._orders.take()
        if not self._writer.is_closing():
            self._writer.write(lines)

    async def _next(self, reader: asyncio.StreamReader) -> bool:
        """Act on the next line; return False at the end of the connection."""
        try:
            text = await next_line(reader, MOST_BYTES, skip=True)
        except ValueError as error:
            self._supervisor.failed("message", error)
            return True
        if text:
            self._answer()
            self._supervisor.call("message", self._receive, text)
        return bool(text)

    def _answer(self) -> None:
        """Let the relay know now and then that the coordinator reads what it sends."""
        now = time.monotonic()
        if now - self._answered_at >= ANSWER_SECONDS and not self._writer.is_closing():
            self._answered_at = now
            self._writer.write(line_to_node(Outgoing(Received()), [], []))

    def _receive(self, text: bytes) -> None:
        frame: FromNode = decode_from_node(text)
        match frame.body:
            case Beats(rows):
                beats = [(session, row[1], Beat(*row[2:])) for row in rows if (session := self._session(row[0]))]
                self._sessions.receive_beats(beats)
            case Hello() as hello:
                for number, _, _ in frame.workers:
                    self._workers[number] = worker = Relayed(self, number)
                    worker.session = self._sessions.open(hello, worker)
                    if worker.session is None:
                        self.drop(number)
            case Return() as greeting:
                for number, _, _ in frame.workers:
                    self._workers[number] = Relayed(self, number)
                    self._return(self._workers[number], greeting)
            case Here():
                for number, _, received in frame.workers:
                    self._take_up(number, received)
            case Gone():
                for number, _, _ in frame.workers:
                    if (gone := self._workers.pop(number, None)) is not None:
                        self._break(gone, 0.0)
            case message:
                senders = [(session, sequence, received) for number, sequence, received in frame.workers
                           if (session := self._session(number))]
                self._sessions.receive_all(message, senders)

    def _session(self, number: int) -> Session | None:
        """Return the session that uses a worker's connection here; None if it is over, or has moved on."""
        worker = self._workers.get(number)
        if worker is None or worker.session is None or worker.session.channel is not worker:
            return None
        return worker.session

    def _return(self, worker: Relayed, greeting: Return) -> None:
        session = self._sessions.find(greeting)
        if session is None:
            worker.send(Outgoing(End()))
            return
        worker.returning = greeting
        self._sessions.welcome_back(session, greeting, worker)

    def _take_up(self, number: int, received: int) -> None:
        worker = self._workers.get(number)
        if worker is None or worker.returning is None:
            return
        worker.session = self._sessions.find(worker.returning)
        worker.returning = None
        if worker.session is None:
            worker.send(Outgoing(End()))
        else:
            self._sessions.take_up(worker.session, worker, received)

    def _break(self, worker: Relayed, grace: float) -> None:
        session = worker.session
        if session is not None and session.channel is worker:
            self._sessions.broken(session, grace)
