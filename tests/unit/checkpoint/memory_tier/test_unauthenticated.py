"""Agents of the memory tier and who does not belong to the run."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from tidewheel import unauthenticated
from tidewheel.checkpoint.memory_tier import agent as module
from tidewheel.checkpoint.memory_tier import protocol
from tidewheel.checkpoint.memory_tier.agent import Agent
from tidewheel.checkpoint.memory_tier.protocol import connect

TOKEN = "secret"
SECONDS = 60.0


@pytest.fixture
def agent() -> Iterator[Agent]:
    running = Agent("127.0.0.1", TOKEN, "unauthenticated")
    yield running
    running.stop()


def works(agent: Agent) -> bool:
    connection = connect(agent.address, TOKEN, seconds=SECONDS)
    connection.ask({"op": "inventory"})
    connection.close()
    return True


def is_closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def test_an_unauthenticated_connection_may_send_little(agent: Agent) -> None:
    """A message of 256 MiB was taken in whole, by each of any number of connections."""
    with socket.create_connection(agent.address, timeout=SECONDS) as connection:
        connection.sendall((unauthenticated.HELLO_BYTES + 1).to_bytes(4, "big"))
        assert is_closed(connection)
    assert works(agent)


def test_an_unauthenticated_connection_has_little_time(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in all: a byte now and then does not help."""
    monkeypatch.setattr(protocol, "HELLO_SECONDS", 1.0)
    with socket.create_connection(agent.address, timeout=SECONDS) as connection:
        connection.sendall((1000).to_bytes(4, "big"))
        with pytest.raises(OSError, match=r"reset|pipe"):  # noqa: PT012
            for _ in range(600):
                connection.sendall(b" ")
                time.sleep(0.1)
    assert works(agent)


def test_an_impostor_may_say_little_either() -> None:
    """A worker asks an address at which another program listens now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = protocol.Address(*listener.getsockname())
        listener.settimeout(SECONDS)
        import threading

        def answer() -> None:
            connection, _ = listener.accept()
            connection.sendall((200 << 20).to_bytes(4, "big"))
            is_closed(connection)
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError, match=f"more than {unauthenticated.HELLO_BYTES}"):
            connect(address, TOKEN)
        thread.join(SECONDS)


def test_many_unauthenticated_connections_keep_no_worker_out(agent: Agent) -> None:
    agent._unauthenticated._max_connections = 10
    inside = connect(agent.address, TOKEN, seconds=SECONDS)
    crowd = [socket.create_connection(agent.address, timeout=SECONDS) for _ in range(40)]
    assert works(agent)
    inside.ask({"op": "inventory"})
    assert is_closed(crowd[0])
    assert len(agent._unauthenticated) <= 10
    for connection in (inside, *crowd):
        connection.close()


@pytest.mark.parametrize("hello", ['{"nonce": "\u00fc", "proof": "\u00fc"}', "[" * 4000, "3", '"\\ud800"',
                                   '{"nonce": "\\ud800", "proof": "\\ud800"}'])
def test_nonsense_is_refused(agent: Agent, hello: str) -> None:
    with socket.create_connection(agent.address, timeout=SECONDS) as connection:
        data = hello.encode()
        connection.sendall(len(data).to_bytes(4, "big") + data)
        assert is_closed(connection)
    assert works(agent)


def test_an_agent_that_cannot_accept_for_a_moment_goes_on(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with too many open files; the agent stopped listening for good."""
    monkeypatch.setattr(module, "ACCEPT_SECONDS", 0.01)
    real, failures = agent._listener, [3]

    class Listener:
        def accept(self):
            if failures[0]:
                failures[0] -= 1
                raise OSError(24, "Too many open files")
            return real.accept()

        def __getattr__(self, name: str):
            return getattr(real, name)

    agent._listener = Listener()  # type: ignore[assignment]
    assert works(agent)  # wakes the accept that is under way
    assert works(agent)
    assert failures == [0]
