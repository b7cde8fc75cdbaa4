"""Upload the newest snapshot when all workers of a run are gone. One agent is elected; then all agents stop."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Protocol

from tidewheel import storage
from tidewheel.checkpoint.memory_tier.inventory import Inventory, Recoverable, ask, inventory, newest_complete
from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.checkpoint.memory_tier.upload import upload
from tidewheel.checkpoint.verify import newest_committed
from tidewheel.commit_log import epoch_of
from tidewheel.errors import CheckpointError, OwnershipError, StorageError
from tidewheel.jsonlog import NO_GENERATION, JsonLog
from tidewheel.time_limit import TimeLimit, bounded

WORKERS_ARE_BACK = "workers are back"


class Holder(Protocol):
    """What this module needs of an agent."""

    address: Address
    token: str


class OrphanUpload:
    """One agent's watch for orphaned snapshots.

    Args:
        seconds: upload once no worker has been on this node for this long, and none is on another.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._idle_since: float | None = None  # None: a worker is here, or none has ever been
        self._retry_at = 0.0
        self._lock = threading.Lock()
        self._limit = TimeLimit()
        self._log: JsonLog | None = None
        self.checkpoints = ""
        """URI of the run's checkpoints, learned from its workers; "": unknown, this agent cannot upload."""
        self.agents: list[Address] = []
        """All agents that had workers."""
        self.abandoned = False
        """The run's driver has ended, so upload without waiting."""

    def cancel(self, reason: str) -> None:
        """Stop an upload under way because workers are back. Safe to call from any thread; returns at once."""
        with self._lock:
            limit = self._limit
        limit.end(reason)

    def check(self, agent: Holder, active: bool) -> None:
        """Upload if it is time to. The agent calls this about once a second.

        Args:
            agent: the agent.
            active: workers or readers are connected to it.
        """
        now = time.monotonic()
        if active or not self.checkpoints:
            self._idle_since = None if active else self._idle_since
            return
        self._idle_since = self._idle_since or now
        if now < self._retry_at or (now - self._idle_since < self._seconds and not self.abandoned):
            return
        self._retry_at = now + self._seconds
        with self._lock:
            self._limit = TimeLimit(what="the upload of the snapshots in memory")
        try:
            self._upload_if_elected(agent, self._limit)
        except (CheckpointError, OwnershipError, StorageError, OSError) as error:
            self._event("upload_failed", reason=(str(error) or type(error).__name__).splitlines()[0])

    def _upload_if_elected(self, agent: Holder, limit: TimeLimit) -> None:
        """Upload the newest complete step unless storage has it, and stop all agents.

        Of the agents that are alive and can upload, the one with the lowest address does so.
        """
        for other in sorted(other for other in self.agents if other < agent.address):
            answer = ask(other, agent.token, {"op": "inventory"})
            if answer is not None and answer["uploads"]:
                return
        inventory = self._inventory(agent)
        newest = newest_complete(inventory)
        if inventory.workers or newest is None:
            return
        fence = {"generation": inventory.generation}  # agents ignore these once a later generation has contacted them
        self._tell_all(inventory, agent, {"op": "keep", "step": newest.step, "of": newest.generation, **fence})
        checkpoints = storage.store(self.checkpoints)
        if newest_committed(checkpoints) < (epoch_of(newest.generation), newest.step):
            self._upload(agent, newest, inventory.generation, checkpoints, limit)
        self._tell_all(inventory, agent, {"op": "release", **fence})

    def _upload(self, agent: Holder, newest: Recoverable, generation: int, checkpoints: storage.Store,
                limit: TimeLimit) -> None:
        def check_nobody_is_back() -> None:
            inventory = self._inventory(agent)
            if inventory.workers or inventory.generation > generation:
                limit.end(WORKERS_ARE_BACK)
            limit.check()

        began = time.monotonic()
        manifest = bounded(
            lambda: upload(newest, checkpoints, own_agent=agent.address, before_commit=check_nobody_is_back), limit)
        self._event("commit", step=newest.step, bytes=manifest.total_bytes, files=len(manifest.files),
                    seconds=round(time.monotonic() - began, 3), by="memory agent")

    def _inventory(self, agent: Holder) -> Inventory:
        return inventory([*self.agents, agent.address], agent.token)

    def _tell_all(self, inventory: Inventory, agent: Holder, message: dict[str, object]) -> None:
        """Send a message to every agent that is alive, this one last because the message may stop it."""
        for other in sorted(inventory.alive, key=lambda other: other == agent.address):
            ask(other, agent.token, message)

    def _event(self, kind: str, **detail: object) -> None:
        """Write an event to the run's events.jsonl at once, because the agent may stop. If storage fails, the event is
        written with the next one."""
        if self._log is None:
            self._log = JsonLog(storage.store(self.checkpoints.rpartition("/")[0]), "events.jsonl", order=NO_GENERATION)
        self._log.append({"time": time.time(), "kind": kind, "detail": detail})
        with contextlib.suppress(StorageError):
            self._log.flush()
