"""Faults on purpose, for the demo and the tests: lost nodes and workers, drains, damaged files.

Only what the caller names is touched. A node of a `LocalCluster` is killed with its `kill_node`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from tidewheel.storage import Store


def kill_process(pid: int) -> None:
    """SIGKILL one process, for example a training worker."""
    os.kill(pid, signal.SIGKILL)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """A process that neither works nor closes its connections while the block runs (SIGSTOP, SIGCONT)."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def drain_node(address: str, node_id: str, notice_seconds: float, reason: str = "spot reclaim") -> bool:
    """Announce that a node will be taken away after `notice_seconds`; it is not killed here.

    Args:
        address: of the cluster, "host:port".
        node_id: 56 hex digits.

    Returns:
        True if the cluster accepted the drain.
    """
    raylet: Any = import_module("ray._raylet")  # compiled: their types cannot be checked
    messages: Any = import_module("ray.core.generated.autoscaler_pb2")
    why = messages.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + notice_seconds) * 1000)
    accepted, _ = raylet.GcsClient(address=address).drain_node(node_id, why, reason, deadline_ms)
    return bool(accepted)


def flip_byte(store: Store, key: str, offset: int) -> None:
    """Invert one byte of an object, as a failing disk would; negative offsets count from the end."""
    data = bytearray(store.read(key))
    data[offset] ^= 0xFF
    store.write(key, bytes(data))
