"""The run's coordinator: one small actor beside the driver that outlives every generation of workers.

It numbers the generations, carries the question "save and wait, please" to rank 0 and the answer back, keeps the
newest progress for the driver, watches the nodes and writes events.jsonl.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from tidewheel import jsonlog, storage
from tidewheel.elastic.nodes import Node
from tidewheel.elastic.policy import HoldState
from tidewheel.jsonlog import JsonLog

NAMESPACE = "tidewheel"
WATCH_SECONDS = 0.5
#: Events that the driver tells people at once; the rest is for the report.
NEWSWORTHY = frozenset({"failure", "node_lost", "node_joined", "node_draining", "resize", "resize_called_off", "resume",
                        "checkpoint_refused", "save_failed", "straggler", "straggler_over", "sink_failed", "guard",
                        "rollback", "hang", "shard_read_again"})


@dataclass(frozen=True)
class Snapshot:
    """The run as the coordinator knows it."""

    generation: int = -1
    """Number of the generation that runs or is being started; -1 before the first."""
    size: int = 0
    """Its workers."""
    state: str = "starting"
    """For people: starting, running, saving, resizing, restarting."""
    hold: HoldState = HoldState.NONE
    held_step: int | None = None
    stepped: bool = False
    """The generation has done a step."""
    furthest_step: int = 0
    """The furthest step any generation has done."""
    progress: dict[str, Any] = field(default_factory=dict)
    """Newest of rank 0: step, steps, loss, tokens_per_second, tokens, world_size."""


class RunState:
    """What the coordinator knows, and how it changes; thread-safe. Calls from an older generation change nothing."""

    def __init__(self, first_generation: int = 0, furthest_step: int = 0) -> None:
        self._lock = threading.Lock()
        self._next = first_generation
        self._now = Snapshot(furthest_step=furthest_step)

    def snapshot(self) -> Snapshot:
        """The run now."""
        return self._now

    def begin(self, size: int) -> int:
        """A new generation of `size` workers is being started; its number."""
        with self._lock:
            generation, self._next = self._next, self._next + 1
            state = "starting" if self._now.generation < 0 else "restarting"
            self._now = replace(self._now, generation=generation, size=size, state=state, hold=HoldState.NONE,
                                held_step=None, stepped=False)
            return generation

    def ask(self, generation: int) -> None:
        """Rank 0 shall save at the next step boundary, and all shall wait."""
        self._change(generation, hold=HoldState.ASKED, state="saving")

    def wanted(self, generation: int) -> bool:
        """What rank 0 polls."""
        return self._now.generation == generation and self._now.hold is HoldState.ASKED

    def held(self, generation: int, step: int) -> None:
        """Rank 0: the save of `step` is committed and everyone waits."""
        if self._now.hold is HoldState.ASKED:
            self._change(generation, hold=HoldState.HELD, held_step=step, state="resizing")

    def holding(self, generation: int) -> bool:
        """Whether a worker of `generation` shall go on waiting."""
        return self._now.generation != generation or self._now.hold is not HoldState.NONE

    def release(self, generation: int) -> None:
        """The planned change is called off: go on."""
        self._change(generation, hold=HoldState.NONE, held_step=None, state="running")

    def step(self, generation: int, progress: dict[str, Any]) -> None:
        """Rank 0 has done a step."""
        hold = self._now.hold
        self._change(generation, progress=progress, stepped=True, state="running" if hold is HoldState.NONE else None,
                     furthest_step=max(self._now.furthest_step, int(progress["step"])))

    def say(self, state: str) -> None:
        """What people shall see as the run's state."""
        with self._lock:
            self._now = replace(self._now, state=state)

    def _change(self, generation: int, **changes: Any) -> None:
        with self._lock:
            if generation == self._now.generation:
                self._now = replace(self._now, **{key: new for key, new in changes.items()
                                                  if new is not None or key == "held_step"})


class Coordinator(RunState):
    """The actor: `RunState`, events.jsonl, and a thread that watches the nodes.

    Args:
        run_uri: the run's folder; what it already says about generations and steps is continued.
    """

    def __init__(self, run_uri: str) -> None:
        store = storage.store(run_uri)
        past = jsonlog.read(store, "events.jsonl")
        generations = [int(event["detail"].get("generation", -1)) for event in past]
        furthest = max((int(line["step"]) for line in jsonlog.read(store, "batches.jsonl")), default=0)
        super().__init__(max(generations, default=-1) + 1, furthest)
        self._log = JsonLog(store, "events.jsonl", flush_seconds=1.0)
        self._news: deque[dict[str, Any]] = deque(maxlen=200)
        self.event("driver_start", {"first_generation": self._next})
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="node watch", daemon=True).start()

    def event(self, kind: str, detail: dict[str, Any], at: float | None = None) -> None:
        """Append one event, at Unix time `at` or now."""
        record = {"time": at or time.time(), "kind": kind, "detail": detail}
        self._log.append(record)
        if kind in NEWSWORTHY and detail.get("action") != "ignore":
            self._news.append(record)

    def news(self) -> list[dict[str, Any]]:
        """What is worth telling since the last call; the driver asks."""
        told = []
        while self._news:
            told.append(self._news.popleft())
        return told

    def end(self) -> None:
        """Write out what is collected and stop watching; the driver calls it last."""
        self._ended.set()
        self._log.flush()

    def _watch(self) -> None:
        from tidewheel.elastic import nodes

        known: dict[str, Node] | None = None
        while not self._ended.wait(WATCH_SECONDS):
            try:
                now = {node.node_id: node for node in nodes.alive()}
            except Exception as error:  # the GCS may be away for a moment: go on watching
                self.event("node_watch_failed", {"error": f"{type(error).__name__}: {error}"[:300]})
                continue
            self._compare(known if known is not None else now, now)
            known = now
            self._log.flush_soon()  # on an object store: at most one part every half second, and only with news

    def _compare(self, known: dict[str, Node], now: dict[str, Node]) -> None:
        for node_id in known.keys() - now.keys():
            self.event("node_lost", {"node": node_id, "host": known[node_id].host})
        for node_id in now.keys() - known.keys():
            self.event("node_joined", {"node": node_id, "host": now[node_id].host, "cpus": now[node_id].cpus})
        for node_id in now.keys() & known.keys():
            if now[node_id].draining and not known[node_id].draining:
                self.event("node_draining", {"node": node_id, "host": now[node_id].host})


def actor_name(run_uri: str) -> str:
    """Name of a run's coordinator: two drivers cannot train the same run at once on one cluster."""
    return f"run-{hashlib.sha256(run_uri.encode()).hexdigest()[:16]}"
