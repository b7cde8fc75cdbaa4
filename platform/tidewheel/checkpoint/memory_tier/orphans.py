"""When all workers of a run are gone for good, one of its agents uploads what they left; then all let go of it."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Protocol

from tidewheel import storage
from tidewheel.checkpoint.memory_tier.find import Inventory, Recoverable, ask, inventory, newest_complete
from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.checkpoint.memory_tier.upload import upload
from tidewheel.checkpoint.verify import newest_committed
from tidewheel.commit_log import epoch_of
from tidewheel.errors import CheckpointError, OwnershipError, StorageError
from tidewheel.jsonlog import BESIDE, JsonLog
from tidewheel.time_limit import TimeLimit, bounded

BACK = "workers are back"


class Holder(Protocol):
    """The agent, as far as it matters here."""

    address: Address
    token: str


class Orphans:
    """One agent's watch over its run.

    Args:
        seconds: so long no worker may have been on this node, and none may be on another.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None  # no worker was here; None: one is, or there was none yet
        self._again = 0.0  # not before, should it not have worked
        self._lock = threading.Lock()
        self._limit = TimeLimit()
        self._log: JsonLog | None = None
        self.checkpoints = ""
        """URI of the run's checkpoints, as its workers said."""
        self.agents: list[Address] = []
        """All agents that had workers."""
        self.abandoned = False
        """The run's driver has ended: nobody is waited for."""

    def cancel(self, reason: str) -> None:
        """Workers are back, here or elsewhere: stop an upload under way. From any thread; returns at once."""
        with self._lock:
            limit = self._limit
        limit.end(reason)

    def look(self, agent: Holder, working: bool) -> None:
        """Called about once a second by the agent."""
        now = time.monotonic()
        if working or not self.checkpoints:
            self._since = None if working else self._since
            return
        self._since = self._since or now
        if now < self._again or (now - self._since < self._seconds and not self.abandoned):
            return
        self._again = now + self._seconds
        with self._lock:
            self._limit = TimeLimit(what="the upload of what was left in memory")
        try:
            self._settle(agent, self._limit)
        except (CheckpointError, OwnershipError, StorageError, OSError) as error:
            self._event("upload_failed", reason=str(error).splitlines()[0])

    def _settle(self, agent: Holder, limit: TimeLimit) -> None:
        """If this agent is the first of those that live: see that the newest whole step is in storage, and let go."""
        for other in sorted(other for other in self.agents if other < agent.address):
            answer = ask(other, agent.token, {"op": "inventory"})
            if answer is not None and answer["uploads"]:
                return  # the other one does
        found = self._left(agent)
        newest = newest_complete(found)
        if found.workers or newest is None:
            return
        left = {"generation": found.generation}  # what a later one has taken up is its own
        self._tell(found, agent, {"op": "keep", "step": newest.step, "of": newest.generation, **left})
        place = storage.store(self.checkpoints)
        if newest_committed(place) < (epoch_of(newest.generation), newest.step):
            self._upload(agent, newest, found.generation, place, limit)
        self._tell(found, agent, {"op": "release", **left})

    def _upload(self, agent: Holder, newest: Recoverable, generation: int, place: storage.Store,
                limit: TimeLimit) -> None:
        def nobody_is_back() -> None:
            found = self._left(agent)
            if found.workers or found.generation > generation:
                limit.end(BACK)
            limit.check()

        began = time.monotonic()
        manifest = bounded(lambda: upload(newest, place, mine=agent.address, before_commit=nobody_is_back), limit)
        self._event("commit", step=newest.step, bytes=manifest.total_bytes, files=len(manifest.files),
                    seconds=round(time.monotonic() - began, 3), by="memory agent")

    def _left(self, agent: Holder) -> Inventory:
        return inventory([*self.agents, agent.address], agent.token)

    def _tell(self, found: Inventory, agent: Holder, message: dict[str, object]) -> None:
        """Tell every agent, this one last: it may end by that."""
        for other in sorted(found.alive, key=lambda other: other == agent.address):
            ask(other, agent.token, message)

    def _event(self, kind: str, **detail: object) -> None:
        """In the run's events.jsonl, now: the agent may end. What storage does not take now waits for the next one."""
        if self._log is None:
            self._log = JsonLog(storage.store(self.checkpoints.rpartition("/")[0]), "events.jsonl", order=BESIDE)
        self._log.append({"time": time.time(), "kind": kind, "detail": detail})
        with contextlib.suppress(StorageError):
            self._log.flush()
