"""A partition in one direction by the kernel's own routing; `test_real_partition` runs it in a network namespace.

    python -m tests.unit.elastic.real_partition unheard|deaf FOLDER

Coordinator and workers have addresses of their own on loopback. A rule drops the packets from one to another, so the
kernel's time limits are at work: what is sent is never acknowledged, and nobody is told.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.unit.elastic.light_team import Team, team
from tidewheel.elastic.client import Client
from tidewheel.elastic.connection import tune
from tidewheel.elastic.coordinator import Coordinator

COORDINATOR = "10.9.0.1"
ADDRESSES = {"a": "10.9.0.2", "b": "10.9.0.3", "c": "10.9.0.4"}
SETUP = "\n".join(["set -e", "ip link set lo up", "ip rule add pref 100 lookup local", "ip rule del pref 0",
                   *(f"ip addr add {address}/32 dev lo" for address in (COORDINATOR, *ADDRESSES.values()))])
"""Commands that prepare a network namespace: the rules of a partition must come before the local table."""


@contextlib.contextmanager
def direct(address: tuple[str, int]) -> Iterator[Any]:
    """Yield the coordinator's own address as that of a worker's network."""
    yield SimpleNamespace(address=address)


def connect(client: Client, seconds: float) -> socket.socket:
    """Connect from the worker's own address."""
    own = ADDRESSES[client._hello.name]
    connection = socket.create_connection(client._address, timeout=seconds, source_address=(own, 0))
    connection.settimeout(None)
    tune(connection)
    return connection


def drop(source: str, target: str) -> None:
    """Drop all packets from one address to another."""
    subprocess.run(["ip", "rule", "add", "pref", "10", "from", source, "to", target, "blackhole"], check=True)


def unheard(group: Team, worker: str) -> None:
    """The coordinator does not hear a worker, and neither do the other workers."""
    group[worker].stands = True
    drop(ADDRESSES[worker], COORDINATOR)


def deaf(group: Team, worker: str) -> None:
    """A worker does not hear the coordinator, and trains."""
    drop(COORDINATOR, ADDRESSES[worker])


def main() -> None:
    """Cut one worker off and print, as JSON, when it was left out and when it ended."""
    Client._connect = connect  # type: ignore[method-assign]
    Coordinator._watch = lambda self: None  # type: ignore[method-assign]
    cut = {"unheard": unheard, "deaf": deaf}[sys.argv[1]]
    with team(Path(sys.argv[2]), *ADDRESSES, host=COORDINATOR, links=direct) as group:
        worker = next(name for name in ADDRESSES if group[name].joined[-1].rank == 2)
        began = time.monotonic()
        cut(group, worker)
        group.trains(1, *(name for name in ADDRESSES if name != worker))
        trains = time.monotonic() - began
        assert group[worker].ended.wait(300)
        assert group.coordinator.fenced() <= {worker}, group.coordinator.fenced()
        assert group.coordinator.snapshot().generation == 1
        print(json.dumps({"others train": round(trains, 1), "worker ended": round(time.monotonic() - began, 1),
                          "error": group.events("failure")[0]["error"]}), flush=True)


if __name__ == "__main__":
    main()
