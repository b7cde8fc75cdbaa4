"""A relay in a process of its own, which tests stop, wake up and kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidewheel.elastic.connection import Endpoint
from tidewheel.elastic.node_relay import NodeRelay


class RelayProcess:
    """The process.

    Args:
        address: host and port of the coordinator.
        token: the run's token.
    """

    def __init__(self, address: tuple[str, int], token: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.elastic.relay_process", address[0], str(address[1])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3],
            env={**os.environ, "RELAY_TOKEN": token})
        assert self._process.stdout is not None
        self.address = ("127.0.0.1", int(self._process.stdout.readline()))

    def freeze(self) -> None:
        """Stop the process. The kernel still accepts connections to it."""
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let the process continue."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def relay_process(address: tuple[str, int], token: str) -> Iterator[RelayProcess]:
    """Run a relay to this coordinator."""
    process = RelayProcess(address, token)
    try:
        yield process
    finally:
        process.kill()


def main() -> None:
    relay = NodeRelay("127.0.0.1", Endpoint((sys.argv[1], int(sys.argv[2])), os.environ["RELAY_TOKEN"]), "n",
                      lambda: None)
    relay.start()
    print(relay.address[1], flush=True)
    sys.stdin.read()  # until the test ends


if __name__ == "__main__":
    main()
