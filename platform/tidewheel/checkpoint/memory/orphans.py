"""When all workers of a run are gone for good, its agents hold what nobody uploads: one of them does."""

from __future__ import annotations

import time
from typing import Protocol

from tidewheel import storage
from tidewheel.checkpoint.memory.find import inventory, newest_complete
from tidewheel.checkpoint.memory.protocol import Address
from tidewheel.checkpoint.memory.upload import upload
from tidewheel.checkpoint.verify import newest_committed
from tidewheel.errors import CheckpointError, StorageError
from tidewheel.jsonlog import JsonLog


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
        self.checkpoints = ""
        """URI of the run's checkpoints, as its workers said."""
        self.agents: list[Address] = []
        """All agents that had workers."""
        self.uploaded = -1
        """The newest step that was."""

    def look(self, agent: Holder, working: bool) -> None:
        """Called about once a second by the agent."""
        if working or not self.checkpoints:
            self._since = None if working else self._since
            return
        self._since = self._since or time.monotonic()
        if time.monotonic() - self._since < self._seconds:
            return
        self._since = time.monotonic()  # again after as long, should it not work now
        try:
            self._upload(agent)
        except (CheckpointError, StorageError, OSError) as error:
            self._event("upload_failed", reason=str(error).splitlines()[0])

    def _upload(self, agent: Holder) -> None:
        found = inventory([*self.agents, agent.address], agent.token)
        newest = newest_complete(found)
        if found.workers or newest is None or min(found.alive) != agent.address or newest.step <= self.uploaded:
            return
        place = storage.store(self.checkpoints)
        if newest_committed(place) < newest.step:
            began = time.monotonic()
            manifest = upload(newest, place, mine=agent.address)
            self._event("commit", step=newest.step, bytes=manifest.total_bytes, files=len(manifest.files),
                        seconds=round(time.monotonic() - began, 3), by="memory agent")
        self.uploaded = newest.step

    def _event(self, kind: str, **detail: object) -> None:
        """In the run's events.jsonl, when storage takes it."""
        log = JsonLog(storage.store(self.checkpoints.rpartition("/")[0]), "events.jsonl")
        log.append({"time": time.time(), "kind": kind, "detail": detail})
        log.flush_soon()
