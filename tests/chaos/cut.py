"""A network of its own between each worker of a disturbed run and the coordinator, which a file makes fail.

The file that CHAOS_NETWORK names has {"node": first 12 digits of a node's id, "fault": name}; while it exists, the
connections of that node's workers have the fault:

up      the coordinator does not hear the workers
down    the workers do not hear the coordinator
both    neither hears the other
slow    2,000 bytes a second, 0.2 s late, a tenth of the packets lost
away    connections are cut, and new ones are not answered
reset   connections are reset once
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.unit.elastic.network import Network, network

FAULTS = ("up", "down", "both", "slow", "away", "reset")
LOOK_SECONDS = 0.1


def behind_a_network(worker: ModuleType, node: str) -> None:
    """Make the workers of this process connect through a proxy that fails as the file says.

    Args:
        worker: `tidewheel.elastic.worker`.
        node: first 12 digits of this node's id.
    """
    file = Path(os.environ.get("CHAOS_NETWORK", "/nowhere"))
    take_part = worker.take_part
    if hasattr(take_part, "chaos"):
        return

    def cut(config: Any, endpoint: Any, **named: Any) -> Any:
        with network(endpoint.address) as link:
            threading.Thread(target=follow, args=(file, node, link), name="network faults", daemon=True).start()
            return take_part(config, replace(endpoint, address=link.address), **named)

    cut.chaos = True  # type: ignore[attr-defined]
    worker.take_part = cut  # type: ignore[attr-defined]


def follow(file: Path, node: str, link: Network) -> None:
    """Give the network the fault that the file names, until it is gone. Runs in a thread, without an end."""
    now = ""
    while True:
        asked = fault_for(file, node)
        if asked != now:
            now = asked
            apply(link, asked)
        time.sleep(LOOK_SECONDS)


def fault_for(file: Path, node: str) -> str:
    """Return the fault that the file gives the node's workers, or nothing."""
    try:
        asked = json.loads(file.read_text())
    except FileNotFoundError:
        return ""
    return str(asked["fault"]) if asked["node"] == node else ""


def apply(link: Network, fault: str) -> None:
    """Give the network one of `FAULTS`, or none."""
    link.up.held = fault in ("up", "both")
    link.down.held = fault in ("down", "both")
    for way in (link.up, link.down):
        way.delay = 0.2 if fault == "slow" else 0.0
        way.loss = 0.1 if fault == "slow" else 0.0
        way.bytes_per_second = 2000.0 if fault == "slow" else math.inf
    if fault == "away":
        link.away()
    elif fault == "reset":
        link.reset()
    else:
        link.back()
