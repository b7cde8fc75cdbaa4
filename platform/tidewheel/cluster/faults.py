"""Inject faults, for the demo and the tests: lost workers, drains, damaged files.

`LocalCluster.kill_node` kills a node.
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
    """Kill one process, such as a training worker, with SIGKILL."""
    os.kill(pid, signal.SIGKILL)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop a process during the block; its connections stay open (SIGSTOP, SIGCONT)."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def drain_node(address: str, node_id: str, notice_seconds: float, reason: str = "spot reclaim") -> bool:
    """Announce that a node will be preempted; do not kill it. Return whether the cluster accepts the drain.

    Args:
        address: address of the cluster, "host:port".
        node_id: id of the node, 56 hex digits.
        notice_seconds: time until the node goes.
        reason: text for the workers' logs.
    """
    raylet: Any = import_module("ray._raylet")  # compiled modules, without types
    messages: Any = import_module("ray.core.generated.autoscaler_pb2")
    why = messages.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + notice_seconds) * 1000)
    accepted, _ = raylet.GcsClient(address=address).drain_node(node_id, why, reason, deadline_ms)
    return bool(accepted)


def flip_byte(store: Store, key: str, offset: int) -> None:
    """Invert one byte of an object, as a failing disk does.

    Args:
        store: storage of the object.
        key: the object.
        offset: position of the byte; a negative one counts from the end.
    """
    data = bytearray(store.read(key))
    data[offset] ^= 0xFF
    store.write(key, bytes(data))
