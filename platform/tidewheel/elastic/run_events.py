"""What the coordinator records of a run: its events, the news for the driver, and the progress of rank 0."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tidewheel.jsonlog import JsonLog
from tidewheel.storage import Store

#: Events that the driver prints at once; the others are for the report.
NEWSWORTHY = frozenset({"failure", "node_lost", "node_joined", "node_draining", "resize", "resize_called_off", "resume",
                        "recovered", "checkpoint_refused", "save_failed", "straggler", "straggler_over", "slow_worker",
                        "shares", "sink_failed", "callback_failed", "guard", "rollback", "hang", "shard_read_again",
                        "storage_away", "memory_refused", "memory_tier_lost", "data_wait", "data_came",
                        "local_disk_refused", "local_disk_failed",
                        "worker_left_out", "worker_readmitted", "taken_over", "coordinator_lost", "setting_changed",
                        "control_error", "tensor_groups_split", "continued_before_decay", "branched", "corruption",
                        "node_excluded", "node_used_again", "slow_link"})
#: Events of nodes by their ids, to which the coordinator adds the nodes' hosts.
NAMES_NODES = frozenset({"failure", "worker_left_out", "worker_readmitted", "slow_link"})
MOST_NEWS = 200


def completed(kind: str, detail: dict[str, Any], unix: float, hosts: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of an event with those that the coordinator adds.

    Args:
        kind: name of the event.
        detail: its fields.
        unix: its time.
        hosts: host by node.
    """
    if kind == "worker_left_out":
        detail = {**detail, "until": unix + detail["seconds"]}
    if kind in NAMES_NODES:
        nodes = detail["nodes"] if "nodes" in detail else [detail["node"]] if "node" in detail else []
        detail = {**detail, "hosts": [hosts.get(node, "") for node in nodes]}
    return detail


@dataclass(frozen=True)
class Snapshot:
    """The run as the coordinator knows it."""

    generation: int = -1
    """Number of the newest generation; -1 before the first."""
    size: int = 0
    """Workers of that generation."""
    state: str = "starting"
    """For people: starting, running, saving, resizing, restarting."""
    progress: dict[str, Any] = field(default_factory=dict)
    """Newest progress of rank 0: step, steps, loss, tokens_per_second, tokens, world_size."""


class RunEvents:
    """Appends events to the run's events.jsonl.

    Args:
        store: the run's folder.
        order: place of these events among those of other processes; see `JsonLog`.
    """

    def __init__(self, store: Store, order: int) -> None:
        self._log = JsonLog(store, "events.jsonl", order=order)
        self._news: deque[dict[str, Any]] = deque(maxlen=MOST_NEWS)

    def record(self, kind: str, detail: dict[str, Any], unix: float) -> None:
        """Append one event.

        Args:
            kind: its name.
            detail: its fields.
            unix: Unix time at which it happened.
        """
        record = {"time": unix, "kind": kind, "detail": detail}
        self._log.append(record)
        if kind in NEWSWORTHY and detail.get("action") != "ignore":
            self._news.append(record)

    def news(self) -> list[dict[str, Any]]:
        """Return the newsworthy events since the last call."""
        news = []
        while self._news:
            news.append(self._news.popleft())
        return news

    def flush_due(self) -> None:
        """Write collected events if it is time."""
        self._log.flush_due()

    def flush(self) -> None:
        """Write all collected events.

        Raises:
            StorageError: the store fails.
        """
        self._log.flush()


class Pace:
    """Speed of one generation, without its first step."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def remaining(self, step: int, steps: int) -> float:
        """Return the seconds until `steps` when `step` is done now; infinity after the first step."""
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        done = step - self._first[0]
        return (steps - step) * (now - self._first[1]) / done if done > 0 else math.inf
