"""The coordinator's server, for tests of connections and relays. Each file has its own `handler`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.elastic.network import TOKEN
from tidewheel.elastic import sessions
from tidewheel.elastic.server import Server


@pytest.fixture
def server(handler: sessions.Handler) -> Iterator[Server]:
    running = Server("127.0.0.1", TOKEN, handler)
    running.start()
    yield running
    running.stop()
