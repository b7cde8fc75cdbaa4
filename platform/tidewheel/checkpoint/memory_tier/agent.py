"""The node's agent: holds snapshots of its node's workers, and replicas from another node.

The agent is a server of plain threads and sockets. It imports neither Ray nor torch. It runs outside the training
processes, so snapshots survive a worker, and their replicas survive the node. Everything is in memory: when an agent
dies, its index is lost, and the next agent on the machine deletes its files (`slots.sweep`).
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tidewheel.checkpoint.memory_tier import requests
from tidewheel.checkpoint.memory_tier.local_disk import LocalDisk
from tidewheel.checkpoint.memory_tier.orphan_upload import OrphanUpload
from tidewheel.checkpoint.memory_tier.part_store import Origin, Part, PartStore
from tidewheel.checkpoint.memory_tier.protocol import Address, Connection, authenticate
from tidewheel.checkpoint.memory_tier.slots import SHARED_MEMORY, Content, Slot, sweep
from tidewheel.checkpoint.memory_tier.worker_session import WorkerSession
from tidewheel.commit_log import epoch_of
from tidewheel.errors import CheckpointError, StorageError
from tidewheel.unauthenticated import UnauthenticatedConnections

LINGER_SECONDS = 900.0
"""An agent without workers stops after this time, even if storage could not take what it holds."""
UPLOAD_SECONDS = 30.0
"""When the run has had no worker for this long, the agents drop all but the newest complete step and upload that. It is
longer than any recovery. When the driver ends, the agents do not wait."""
SWEEP_SECONDS = 30.0
"""Time between two searches for files of dead agents."""
ACCEPT_SECONDS = 0.2
"""Pause after a connection that could not be accepted."""
NICENESS = 4
"""Added to the priority of the agent's process: hashing and sending give way to training on the same core."""


class Agent:
    """A server on `host` that runs from construction until `stop`.

    Args:
        host: the node's own address, or 127.0.0.1.
        token: the run's secret; connections that do not prove that they know it are closed.
        run: a short name for the folder in shared memory.
        root: the folder of shared memory.
        linger_seconds: without any worker on this node for this long, the agent stops.
        upload_seconds: without any worker on any node for this long, one agent uploads the newest complete step unless
            storage has it. Then all agents stop.
        on_stop: called after the agent has stopped.
        disk: folder on the local disk, and the most bytes in it (0: no limit); None: snapshots stay in memory.
    """

    def __init__(self, host: str, token: str, run: str, *, root: Path = SHARED_MEMORY,
                 linger_seconds: float = LINGER_SECONDS, upload_seconds: float = UPLOAD_SECONDS,
                 on_stop: Callable[[], None] | None = None, disk: tuple[Path, int] | None = None) -> None:
        sweep(root)
        self.token = token
        self.store = PartStore(run, root)
        self.orphan_upload = OrphanUpload(upload_seconds)
        self.disk: LocalDisk | None = None
        self.disk_problem = ""
        """Why snapshots cannot be written to the local disk."""
        if disk is not None:
            try:
                self.disk = LocalDisk(disk[0], run, self.store, limit_bytes=disk[1])
            except StorageError as error:
                self.disk_problem = f"{error.where}: {error.what}"
        self._root, self._on_stop, self._linger = root, on_stop, linger_seconds
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._readers: set[Connection] = set()
        self._stopped = threading.Event()
        self._last_active = time.monotonic()
        self._unauthenticated = UnauthenticatedConnections()
        self._generation = -1
        self._listener = socket.create_server((host, 0), backlog=256)
        self.address = Address(host, self._listener.getsockname()[1])
        threading.Thread(target=self._listen, name="memory agent", daemon=True).start()
        threading.Thread(target=self._watch_idleness, name="memory agent linger", daemon=True).start()

    @property
    def stopped(self) -> threading.Event:
        """Set when the agent begins to stop."""
        return self._stopped

    @property
    def generation(self) -> int:
        """Number of the newest generation that has contacted this agent; -1 before the first."""
        return self._generation

    def stop(self, *, keep_disk: bool = False) -> None:
        """Delete everything that is held and close all connections.

        Args:
            keep_disk: leave what is on the local disk to the next agent.
        """
        with self._lock:
            if self._stopped.is_set():
                return
            self._stopped.set()
            connections = list(self._connections)
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.store.remove()
        if self.disk is not None:
            self.disk.close(keep=keep_disk)
        for connection in connections:  # last: a client takes the closed connection as proof that all is deleted
            connection.close()
        if self._on_stop is not None:
            self._on_stop()

    # -- connections ---------------------------------------------------------------------------
    def _listen(self) -> None:
        while not self._stopped.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:  # the listener was closed, or this process has too many open files right now
                self._stopped.wait(ACCEPT_SECONDS)
                continue
            threading.Thread(target=self._serve, args=(sock,), name="memory agent connection", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with self._unauthenticated.admitted(functools.partial(_hang_up, sock)):
                connection = authenticate(sock, self.token)
        except OSError:
            return  # unauthenticated, or already closed
        with self._lock:
            self._connections.add(connection)
        worker = WorkerSession(self)
        try:
            while not self._stopped.is_set():
                requests.answer(self, connection, connection.receive(), worker)
        except OSError:
            pass  # the peer hung up, which is how a connection normally ends
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)
                self._readers.discard(connection)
            if not self._stopped.is_set():
                worker.end()

    def add_reader(self, connection: Connection) -> None:
        """Keep the agent alive while `connection` loads or uploads what is held here."""
        with self._lock:
            self._readers.add(connection)

    def _watch_idleness(self) -> None:
        """Stop the agent when nobody needs it any more."""
        last_sweep = time.monotonic()
        while not self._stopped.wait(min(1.0, self._linger)):
            if time.monotonic() - last_sweep > SWEEP_SECONDS:
                sweep(self._root)
                last_sweep = time.monotonic()
            with self._lock:
                has_connections, has_readers = bool(self._connections), bool(self._readers)
            active = bool(has_readers or self.store.num_workers)
            self.orphan_upload.check(self, active)
            if active:
                self._last_active = time.monotonic()
            elif time.monotonic() - self._last_active > self._linger and not has_connections:
                self.stop(keep_disk=True)  # with a connection, another agent may be reading what it uploads

    # -- generations ---------------------------------------------------------------------------
    def hear_of(self, generation: int) -> None:
        """Record that `generation` is active: refuse earlier epochs from now on, and cancel an upload of orphans.

        Raises:
            CheckpointError: `generation` is of an earlier epoch than one that has contacted this agent.
        """
        with self._lock:
            newest = self._generation
            if epoch_of(generation) >= epoch_of(newest):
                self._generation = max(newest, generation)
        if epoch_of(generation) < epoch_of(newest):
            raise CheckpointError(
                f"generation {generation} is of epoch {epoch_of(generation)}, and epoch {epoch_of(newest)} of the run "
                "has begun", where="memory tier", fix="nothing: another driver has taken the run over")
        self._last_active = time.monotonic()
        self.orphan_upload.cancel(f"generation {generation} is at work")

    def is_orphaned(self, generation: int) -> bool:
        """Return whether no worker is here and no generation after `generation` has contacted this agent."""
        return not self.store.num_workers and self._generation <= generation

    def learn(self, message: dict[str, Any]) -> None:
        """Take the URI of the run's checkpoints and the addresses of its other agents from a worker's message."""
        self.orphan_upload.abandoned = False
        self.orphan_upload.checkpoints = str(message.get("checkpoints", ""))
        self.orphan_upload.agents = [Address(str(host), int(port)) for host, port in message.get("agents", ())]

    def hold(self, slot: Slot, content: Content, origin: Origin, hashes: np.ndarray) -> Part:
        """Serve `content` of `slot` from now on.

        Args:
            slot: the slot that holds it.
            content: what the slot's header says.
            origin: "own" for a worker of this node, "copy" for a replica.
            hashes: uint64 [blocks], see `slots.hash_blocks`.

        Raises:
            CheckpointError: a newer epoch has begun.
        """
        self.hear_of(content.generation)
        return self.store.add(slot, content, origin, hashes)


def _hang_up(sock: socket.socket) -> None:
    """End a connection that another thread waits on."""
    with contextlib.suppress(OSError):  # already closed
        sock.shutdown(socket.SHUT_RDWR)
