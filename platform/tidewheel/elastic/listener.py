"""A thread that listens for connections and serves those whose first line shows the run's token."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import threading
from dataclasses import replace

from tidewheel.elastic.connection import first_line, tune
from tidewheel.elastic.messages import Greeting, decode_from_worker
from tidewheel.unauthenticated import HELLO_BYTES, MAX_CONNECTIONS, UnauthenticatedConnections


class Listener:
    """The thread and its event loop. A subclass says what happens on a connection, and beside the connections.

    Args:
        host: address to listen on.
        token: token that a peer must show.
        thread: name of the thread.
        kinds: types of messages that may come first.
        backlog: connections that the kernel holds until they are accepted, if its own limit (net.core.somaxconn) allows
            so many.
        most: unauthenticated connections that may be open at a time.
    """

    def __init__(self, host: str, token: str, *, thread: str, kinds: tuple[type[Greeting], ...], backlog: int,
                 most: int = MAX_CONNECTIONS) -> None:
        self.address: tuple[str, int] = (host, 0)
        """Where it listens."""
        self._token = token
        self._kinds = kinds
        self._backlog = backlog
        self._unauthenticated = UnauthenticatedConnections(most)
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()  # set it in the thread only
        self._ready = threading.Event()
        self._problem: OSError | None = None
        self._thread = threading.Thread(target=self._run, name=thread, daemon=True)

    def start(self) -> None:
        """Listen, and set `address`.

        Raises:
            OSError: the address is not this machine's.
        """
        self._thread.start()
        self._ready.wait()
        if self._problem is not None:
            raise self._problem

    def stop(self) -> None:
        """Close all connections and end the thread."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(timeout=5)

    # -- for subclasses ----------------------------------------------------------------------------
    def _begin(self) -> None:
        """Start tasks beside the connections; called in the thread."""

    async def _serve(self, greeting: Greeting, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Act on a connection, which is closed at the end.

        Args:
            greeting: its first message, without the token.
            reader: what arrives.
            writer: this end.
        """
        raise NotImplementedError

    def _end(self) -> None:
        """Drop what is open when the thread ends."""

    # -- the thread --------------------------------------------------------------------------------
    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            server = self._loop.run_until_complete(
                asyncio.start_server(self._accept, self.address[0], 0, limit=HELLO_BYTES, backlog=self._backlog))
            self.address = (self.address[0], server.sockets[0].getsockname()[1])
        except OSError as error:
            self._problem = error
            self._loop.close()
            return
        finally:
            self._ready.set()
        self._begin()
        self._loop.run_until_complete(self._stopped.wait())
        server.close()
        self._end()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            greeting = await self._greeting(reader, writer)
            if greeting is not None:
                tune(writer.get_extra_info("socket"))
                await self._serve(greeting, reader, writer)
        except OSError:
            pass  # the connection broke before it was in use
        finally:
            writer.transport.abort()

    async def _greeting(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Greeting | None:
        """Return the first message, without its token; None for an unauthenticated peer."""
        with self._unauthenticated.admitted(writer.transport.abort):
            try:
                greeting = decode_from_worker(await first_line(reader)).body
            except (TimeoutError, ValueError):
                return None
        if not isinstance(greeting, self._kinds):
            return None
        known = hmac.compare_digest(greeting.token.encode(), self._token.encode())
        return replace(greeting, token="") if known else None
