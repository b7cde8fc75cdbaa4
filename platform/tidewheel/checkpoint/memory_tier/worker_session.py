"""The slots of one worker, and its requests to the agent of its node."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tidewheel.checkpoint.memory_tier.part_store import Part
from tidewheel.checkpoint.memory_tier.protocol import Address, FileRange
from tidewheel.checkpoint.memory_tier.replicas import ReplicaSender
from tidewheel.checkpoint.memory_tier.slots import HEADER_BYTES, MAX_SLOTS, SLOTS_PER_WORKER, Slot
from tidewheel.errors import CheckpointError

if TYPE_CHECKING:
    from tidewheel.checkpoint.memory_tier.agent import Agent


class WorkerSession:
    """What the agent keeps for one connection. It has no slots unless the client is a worker that opens some.

    Args:
        agent: the agent that serves the connection.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._replicas = ReplicaSender((), agent.token)
        self._last_sequence = 0
        self.slots: list[Slot] = []
        self._num_slots = SLOTS_PER_WORKER
        self._allocating: threading.Thread | None = None
        self._slot_added = threading.Condition()
        self._problem: Exception | None = None

    def open(self, message: dict[str, Any]) -> None:
        """Begin to allocate the worker's slots. Parts in its previous slots are still served.

        Args:
            message: "generation", "capacity" in bytes, "slots" (their number), "replicas" (agents that may
                hold replicas, in order of preference), and what `Agent.learn` takes.

        Raises:
            CheckpointError: a newer epoch has begun.
        """
        self._agent.hear_of(int(message["generation"]))
        self._wait_for_slots()
        self._agent.store.release(self)
        self._agent.learn(message)
        self._replicas.close()
        self._replicas = ReplicaSender([Address(str(host), int(port)) for host, port in message["replicas"]],
                                       self._agent.token)
        self.slots, self._problem = [], None
        self._num_slots = min(int(message.get("slots", SLOTS_PER_WORKER)), MAX_SLOTS)
        self._agent.store.enrol(self)
        self._allocating = threading.Thread(target=self._allocate, args=(int(message["capacity"]),), daemon=True)
        self._allocating.start()

    def _allocate(self, capacity: int) -> None:
        """Allocate all slots, one after the other: new pages take seconds per gigabyte, and training need not wait."""
        for _ in range(self._num_slots):
            try:
                slot: Slot | None = self._agent.store.allocate(capacity)
            except (CheckpointError, OSError) as error:
                self._problem, slot = error, None
            with self._slot_added:
                if slot is not None:
                    self.slots.append(slot)
                self._slot_added.notify_all()
            if slot is None:
                return

    def slot(self, index: int) -> Slot:
        """Return slot `index`, once it is allocated.

        Raises:
            CheckpointError: there is not enough shared memory.
            LookupError: the worker has no slot with this index.
        """
        if not 0 <= index < self._num_slots:
            raise LookupError(f"there is no slot {index}")
        with self._slot_added:
            self._slot_added.wait_for(lambda: len(self.slots) > index or self._problem is not None)
            if len(self.slots) <= index:
                assert self._problem is not None
                raise self._problem
            return self.slots[index]

    def _wait_for_slots(self) -> None:
        if self._allocating is not None:
            self._allocating.join()

    def put(self, index: int, *, disk: bool = False) -> dict[str, Any]:
        """Hash and serve slot `index`, which the worker has filled, and send a replica.

        Args:
            index: of the slot.
            disk: also write it to the local disk, in the background.

        Returns:
            the answer to the worker: "step", "bytes", "hash_seconds", "push_seconds", "copied_to" ("host:port" of the
            agent that holds the replica, or ""), "refused" (why other agents did not take it), "disk_busy" (a part of
            this worker is being written to the local disk) and "disk_problem" (why the last such write failed, or "").

        Raises:
            CheckpointError: a newer epoch has begun.
            LookupError: the slot is not allocated.
            ValueError: the slot is empty.
        """
        began = time.monotonic()
        if not 0 <= index < len(self.slots):
            raise LookupError(f"there is no slot {index}")
        slot = self.slots[index]
        content = slot.content()
        if content is None:
            raise ValueError(f"slot {index} holds nothing")
        hashes = slot.hashes(content.end)
        part = self._agent.hold(slot, content, "own", hashes)
        self._last_sequence = content.sequence
        hashed = time.monotonic()
        on_disk = self._to_disk(part, disk)
        copied_to, refused = self._replicas.send(
            {"op": "store", "content": asdict(content)},
            FileRange(part.slot.path, HEADER_BYTES, content.end), part.hashes.tobytes())
        return {"step": content.step, "bytes": content.end, "hash_seconds": hashed - began,
                "push_seconds": time.monotonic() - hashed, "copied_to": copied_to, "refused": refused, **on_disk}

    def _to_disk(self, part: Part, requested: bool) -> dict[str, Any]:
        """Write a part to the local disk if that is requested; return the state of these writes."""
        disk = self._agent.disk
        if disk is None:
            problem = self._agent.disk_problem if requested else ""
            return {"disk_busy": False, "disk_problem": problem}
        if requested:
            disk.write(part)
        return {"disk_busy": disk.busy(part.content.rank), "disk_problem": disk.take_problem()}

    def forget(self, message: dict[str, Any]) -> None:
        """Pass a request to forget on to the agents that hold this worker's replicas."""
        self._replicas.tell_all(message)

    def end(self) -> None:
        """Release the slots when the connection has closed; first take in snapshots that the worker just completed."""
        self._wait_for_slots()
        completed: list[tuple[int, int]] = []
        for index, slot in enumerate(self.slots):
            content = slot.content()
            if content is not None and content.sequence > self._last_sequence:
                completed.append((content.sequence, index))
        with contextlib.suppress(CheckpointError):  # a newer epoch has begun, so they are obsolete
            for _, index in sorted(completed):
                self.put(index)
        self._replicas.close()
        self._agent.store.release(self)
