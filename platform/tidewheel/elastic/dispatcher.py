"""Carries what the workers say to the membership, and what the membership decides to the workers.

Everything here runs in the server's thread, one call at a time. `Coordinator` makes the calls of other processes there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tidewheel.elastic.generation import Generation, Phase
from tidewheel.elastic.lobby import Lobby
from tidewheel.elastic.membership import Membership
from tidewheel.elastic.messages import (
    Beat,
    CoordinatorMessage,
    Hello,
    Join,
    Leaving,
    Left,
    Probed,
    StepDone,
    WorkerEvent,
    WorkerMessage,
)
from tidewheel.elastic.node_agents import NodeAgents
from tidewheel.elastic.node_health import clock_problem
from tidewheel.elastic.node_watch import NodeChanges
from tidewheel.elastic.outgoing import ANY_RANK
from tidewheel.elastic.policy import Recovery
from tidewheel.elastic.run_record import RunRecord
from tidewheel.elastic.server import Server
from tidewheel.elastic.silence import beat_seconds
from tidewheel.elastic.slow import judged
from tidewheel.train.elastic_config import ElasticConfig

logger = logging.getLogger(__name__)


class Dispatcher:
    """Handles the server's connections (`sessions.Handler`) and the membership's decisions (`generation.Outbox`).

    Args:
        elastic: time limits and policies.
        record: gets events and progress.
        agents: the memory agents of the nodes.
    """

    membership: Membership
    """Decides; set it before the first call."""

    def __init__(self, elastic: ElasticConfig, record: RunRecord, agents: NodeAgents) -> None:
        self.server: Server | None = None
        """Has the connections to the workers; None until it listens."""
        self.rendezvous: tuple[str, int] = ("", 0)
        """Host and port of the store at which the ranks of a generation meet."""
        self.cut = set[str]()
        """Workers that were cut off, whose processes must end."""
        self.nodes_with_losses = set[str]()
        """Nodes on which workers ended before the run was over."""
        self._elastic = elastic
        self._record = record
        self._agents = agents
        self._known = set[str]()
        self._lobby = Lobby(self._admit, agents.is_ready)

    # -- what others report ------------------------------------------------------------------------
    def expect(self, workers: Mapping[str, str], *, anew: bool) -> None:
        """Note workers that are being started; see `Coordinator.expect`."""
        self._known.update(workers)  # one that dies before it connects is lost like any other
        self.membership.expect(workers, time.monotonic(), anew=anew)

    def dead(self, names: Iterable[str], why: str) -> list[str]:
        """Note workers that Ray reports as dead; return those whose loss is handled here."""
        known = [name for name in names if name in self._known]
        for name in known:
            self.fence(name)
            self.membership.lost(name, why, time.monotonic())
        return known if self.membership.phase is not Phase.FAILED else []

    def failed(self, text: str, ranks: Sequence[int], *, retryable: bool, lost: bool) -> Recovery:
        """Return how to recover from a failure of Ray Train's group of workers.

        Args:
            text: the error.
            ranks: the ranks that failed.
            retryable: a restart may help.
            lost: workers were lost.
        """
        snapshot = self._record.snapshot
        recorded = self._record.failed == snapshot.generation
        recovery = self.membership.recovery
        if not retryable:
            recovery = Recovery.NONE
        elif not recorded:
            recovery = self.membership.failures.charge(counted=not lost)
        if recovery is Recovery.IN_PLACE:
            recovery = Recovery.KEPT
        if not recorded:
            self.event("failure", {"generation": snapshot.generation, "ranks": list(ranks), "error": text,
                                   "recovery": str(recovery), "restart": recovery is not Recovery.NONE,
                                   "step": snapshot.progress.get("step", 0)})
        return recovery

    def nodes_changed(self, changes: NodeChanges) -> None:
        """Act on nodes that are about to leave, and on nodes that are gone."""
        self.membership.drain(changes.draining)
        for node in changes.lost:
            self._agents.lost(node, for_good=True)
        for worker in list(self.membership.workers.values()):
            if worker.node in changes.lost:
                self.fence(worker.name)
                self.membership.lost(worker.name, f"node {changes.lost[worker.node]} is gone", time.monotonic())

    # -- the membership's outbox -------------------------------------------------------------------
    def send(self, worker: str, message: CoordinatorMessage) -> None:
        """Send a message to a worker."""
        self.send_all((worker,), message)

    def send_all(self, workers: Collection[str], message: CoordinatorMessage) -> None:
        """Send a message to several workers."""
        if self.server is not None:
            self.server.send_all(workers, message)

    def fence(self, worker: str) -> None:
        """Cut off a worker."""
        logger.info("worker %s is cut off", worker)
        self.cut.add(worker)
        self._note_loss(worker)
        self._lobby.leave(worker)
        fenced = self.membership.workers.get(worker)
        if fenced is not None:
            self._agents.cut_on(fenced.node)
        if self.server is not None:
            self.server.cut(worker)

    def unheard(self, worker: str) -> float:
        """Return the seconds for which a worker that is connected has acknowledged no message; 0.0 if none waits."""
        return self.server.unheard(worker) if self.server is not None else 0.0

    def event(self, kind: str, detail: dict[str, Any], at: float | None = None) -> None:
        """Record an event.

        Args:
            kind: its name.
            detail: its fields.
            at: monotonic seconds; None: now.
        """
        self._record.event(kind, detail, at)

    def form(self, generation: Generation) -> None:
        """Tell the members of a new generation to join it."""
        self._agents.look_again(self.membership.workers.values())
        size = len(generation.members)
        self._record.begin(generation.number, size)
        if self.server is None:
            return
        order = Join(generation.number, ANY_RANK, size, self.rendezvous, None,
                     self._record.history(self.membership.furthest_step),
                     beat_seconds(size, self._elastic.heartbeat_seconds))
        for placement, ranks in self._agents.placements(generation, self.membership.workers):
            self.server.join(ranks, replace(order, memory=placement))

    # -- the server's handler ----------------------------------------------------------------------
    def opened(self, hello: Hello) -> None:
        """Admit a worker, once the agent of its node is known and has tested its links."""
        logger.info("worker %s on node %s is connected", hello.name, hello.node)
        self._known.add(hello.name)
        self._agents.forget(hello.name)
        if not self._agents.is_ready(hello.node):
            self._agents.want([hello.node])
        self._lobby.enter(hello)

    def _admit(self, hello: Hello) -> None:
        problem = hello.problem or self._agents.problem(hello.node)
        ask = bool(clock_problem(hello.clock, time.time(), self._elastic.node_checks))
        self.membership.hello(hello.name, hello.node, time.monotonic(), spot=hello.spot, device=hello.device,
                              problem=problem, ask=ask)

    def received(self, name: str, message: WorkerMessage) -> None:
        """Act on a message of a worker."""
        now = time.monotonic()
        membership = self.membership
        match message:
            case StepDone():
                seconds = self._record.step(message)
                if seconds is not None:
                    membership.remaining_seconds = seconds
                membership.beat(name, message.generation, message.step, now)
            case WorkerEvent():
                self._worker_event(name, message)
            case Leaving():
                membership.leaving(name)
            case Probed(problem, clock):
                worker = membership.workers.get(name)
                asked = now - (worker.probed_at if worker and worker.probed_at is not None else now)
                problem = problem or clock_problem(clock, time.time() - asked, self._elastic.node_checks)
                membership.probed(name, problem, now)

    def _worker_event(self, name: str, message: WorkerEvent) -> None:
        detail = message.detail
        if message.kind == "slow_worker":
            detail = judged(detail, self._elastic.slow_worker, self.membership)
        self._record.worker_event(message.kind, detail, message.time)
        worker = self.membership.workers.get(name)
        if worker is None:
            return
        if message.kind == "memory_tier_lost" and self.membership.phase is Phase.RUNNING:
            self._agents.lost(worker.node, for_good=False)  # the next generation gets another agent
        elif message.kind == "relay_left":
            self._agents.doubt_relay(worker.node)

    def left(self, names: Sequence[str], report: Left) -> None:
        """Act on equal reports of workers that have left their generation."""
        self.membership.left(names, report, time.monotonic())

    def beats(self, beats: Iterable[tuple[str, Beat]]) -> None:
        """Act on heartbeats of workers."""
        now = time.monotonic()
        for name, beat in beats:
            self.membership.beat(name, beat.generation, beat.step, now, work=beat.work, aborts=beat.aborts)

    def returned(self, name: str, seconds: float) -> None:
        """Record that a worker has reconnected."""
        logger.info("worker %s has reconnected after %.3f s", name, seconds)
        self.membership.beat(name, -1, 0, time.monotonic())
        worker = self.membership.workers.get(name)
        self._record.worker_event("worker_reconnected", {"worker": name, "node": worker.node if worker else "",
                                                         "seconds": round(seconds, 3)}, time.time())

    def closed(self, name: str) -> None:
        """Treat a worker whose session is over as lost."""
        logger.info("the connection of worker %s is closed", name)
        self._lobby.leave(name)
        self._note_loss(name)
        self.membership.lost(name, "its process has ended, or is cut off", time.monotonic())

    def relay_closed(self, node: str) -> None:
        """Note that the relay of a node may have ended."""
        self._agents.doubt_relay(node)

    def _note_loss(self, name: str) -> None:
        worker = self.membership.workers.get(name)
        if worker is not None and self.membership.phase is not Phase.OVER:
            self.nodes_with_losses.add(worker.node)

    def tick(self) -> None:
        """Act on the time."""
        now = time.monotonic()
        self._lobby.look(now)
        self.membership.tick(now)
        self._agents.look_again(self.membership.workers.values())
