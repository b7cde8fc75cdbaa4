"""A worker's side of its connection to the coordinator: receive orders, send reports and heartbeats."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from tidewheel.elastic.client import RELAY_SHARE, Client
from tidewheel.elastic.connection import Endpoint
from tidewheel.elastic.faults import Report
from tidewheel.elastic.messages import (
    BEAT_SECONDS,
    Abort,
    AgentTable,
    Beat,
    CoordinatorMessage,
    GoOn,
    Hello,
    Join,
    Leaving,
    Left,
    Order,
    Over,
    Probe,
    Raise,
    StepDone,
    Stop,
    TakenOver,
    WorkerEvent,
    WorkerMessage,
)
from tidewheel.elastic.owner_watch import OwnerWatch
from tidewheel.train.runtime import Control, Preempted

if TYPE_CHECKING:
    from tidewheel.elastic.process_group import GenerationGroup

logger = logging.getLogger(__name__)

TEXT_CHARACTERS = 2000
"""Characters of an error that a worker reports."""
EXIT_CODE = 71
"""EX_OSERR of sysexits.h: the coordinator cut this worker off, or is gone."""

members: list[Member] = []
"""This process as a worker, if it is one; for the signal handler."""


class Member:
    """A worker process as the coordinator sees it. One thread receives messages, another sends heartbeats.

    A broken connection is restored (`client`). Until then rank 0 waits at its next step boundary, because a worker
    that was cut off must stop training. The process ends when the coordinator is gone, cannot be reached for
    `connection.RECONNECT_SECONDS`, or continues without this worker. It also ends when the coordinator does not answer
    and another driver owns the run (`owner_watch`).

    Args:
        endpoint: where the coordinator listens.
        name: unique name of this process.
        node: id of its node.
        spot: the node may be taken away at any time.
        device: GPUs of this process, as the node numbers them; "" on CPU.
        problem: what its test before the start found; "" if it passed.
        relay: host and port of the node's relay; None: connect directly.
        heartbeat_seconds: limit of silence after which the coordinator cuts off a worker.
    """

    def __init__(self, endpoint: Endpoint, name: str, node: str, *, spot: bool = False, device: str = "",
                 problem: str = "", relay: tuple[str, int] | None = None, heartbeat_seconds: float = 3.0) -> None:
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        """Messages that the training thread waits for."""
        self.stop = False
        """Leave at the next step boundary."""
        self.save = False
        """Save to storage at the next step boundary."""
        self.terminated = False
        """The process was asked to end."""
        self.generation = -1
        self.step = 0
        self._group: GenerationGroup | None = None  # of the present generation
        self._aborted = -1
        self._beat_seconds = BEAT_SECONDS
        self._table: AgentTable | None = None  # the newest
        has_clocks = hasattr(time, "pthread_getcpuclockid")  # not on every system
        self._clock = time.pthread_getcpuclockid(threading.get_ident()) if has_clocks else None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        logger.info("connects to the coordinator %s", f"through the relay at {relay}" if relay else "directly")
        hello = Hello(name, node, endpoint.token, spot=spot, device=device, problem=problem, clock=time.time())
        self._client = Client(endpoint.address, hello, self._receive, end_process, relay=relay,
                              relay_seconds=heartbeat_seconds * RELAY_SHARE)
        self._owner_watch = OwnerWatch(endpoint, lambda: self._client.unanswered, end_process)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def begin(self, generation: int, group: GenerationGroup) -> None:
        """Begin a generation, whose `group` breaks off its connections when the coordinator aborts it."""
        with self._lock:
            self.generation = generation
            self.step = 0
            self.stop = False
            self.save = False
            self._group = group
            if self._aborted >= generation:
                group.break_off()

    def left(self, report: Report) -> None:
        """Report that this worker has left its generation."""
        with self._lock:
            self._group = None
        self.send(Left(self.generation, report.reason, report.text[:TEXT_CHARACTERS], report.error_kind,
                       report.accused, report.saved_step))

    def wait_connected(self) -> None:
        """Wait until the coordinator can be reached; after `connection.RECONNECT_SECONDS` the process ends."""
        self._client.connected.wait()

    def send(self, message: WorkerMessage) -> None:
        """Send a message to the coordinator."""
        self._client.send(message)

    def close(self) -> None:
        """End the connection; the process continues."""
        self._closed.set()
        self._owner_watch.close()
        self._client.close()

    def terminate(self) -> None:
        """End the process after SIGTERM: during a generation at a step boundary, otherwise at once."""
        self.terminated = True
        self.send(Leaving())
        with self._lock:
            busy = self._group is not None
        if not busy:
            end_process()

    def _receive(self, message: CoordinatorMessage) -> None:
        match message:
            case Abort(generation):
                with self._lock:
                    self._aborted = max(self._aborted, generation)
                    if self._group is not None and self.generation <= self._aborted:
                        self._group.break_off()
            case Stop(generation, save):
                if generation == self.generation:
                    self.save = save
                    self.stop = True
            case GoOn(generation):
                if generation == self.generation:
                    self.save = False
                    self.stop = False
            case Join():
                self._beat_seconds = message.beat_seconds
                self.orders.put(self._completed(message))
            case Probe() | Raise() | Over():
                self.orders.put(message)
            case TakenOver(reason):
                end_process(reason)

    def _completed(self, join: Join) -> Join:
        """Return the order with the table of memory agents, which is sent only when it has changed."""
        if join.memory is None:
            return join
        self._table = join.memory.agents or self._table
        return replace(join, memory=replace(join.memory, agents=self._table))

    def _beat(self) -> None:
        while not self._closed.wait(self._beat_seconds):
            self.send(Beat(self.generation, self.step, self._cpu_seconds(), self._aborted))

    def _cpu_seconds(self) -> float:
        """Return the CPU seconds of the thread that created this object: the training thread."""
        if self._clock is None:
            return 0.0
        with contextlib.suppress(OSError):  # the thread has ended
            return round(time.clock_gettime(self._clock), 2)
        return 0.0


class RunControl(Control):
    """A `Control` over the connection to the coordinator. Only `poll` waits, until a broken connection is restored.

    Args:
        member: this process as a worker.
        rank: its rank.
    """

    def __init__(self, member: Member, rank: int) -> None:
        self._member = member
        self._rank = rank

    @property
    def stepped(self) -> bool:
        """Whether this generation has done a step, as far as this rank knows."""
        return self._member.step > 0

    def poll(self) -> bool:
        self._member.wait_connected()
        return self._member.stop

    def save_requested(self) -> bool:
        return self._member.save

    def hold(self, step: int) -> NoReturn:
        raise Preempted(step)

    def event(self, kind: str, **detail: Any) -> None:
        logger.info("event %s %s", kind, json.dumps(detail, default=str))
        self._member.send(WorkerEvent(kind, {"rank": self._rank, **detail}, time.time()))

    def progress(self, step: int, steps: int, **metrics: Any) -> None:
        self._member.step = step
        self._member.send(StepDone(self._member.generation, step, steps, metrics))


def end_process(why: str = "it was asked to end, was cut off, or the coordinator is gone") -> None:
    """Write the last log lines and end this process at once, without waiting for its threads."""
    from tidewheel.train.logs import worker_log

    logger.warning("this worker ends: %s", why)
    worker_log.last_words()
    os._exit(EXIT_CODE)


def notice() -> None:
    """Respond to SIGTERM: leave at a step boundary."""
    if members:
        threading.Thread(target=members[-1].terminate, name="notice").start()
    else:
        end_process()
