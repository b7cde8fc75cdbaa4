"""The run's coordinator: one small actor beside the driver that outlives every generation of workers.

Workers connect to it directly (`server`). It forms the generations (`membership`), hosts the store at which their ranks
meet, watches the nodes, keeps the newest progress for the driver and writes events.jsonl.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tidewheel import storage
from tidewheel.cluster.node_history import NodeHistory
from tidewheel.commit_log import first_generation
from tidewheel.elastic.agent_supervisor import AgentSupervisor
from tidewheel.elastic.agents import Agents
from tidewheel.elastic.blame import Blame
from tidewheel.elastic.connection import Endpoint
from tidewheel.elastic.generation import Generation, Phase, limits_of
from tidewheel.elastic.link_checks import LinkChecks
from tidewheel.elastic.lobby import Lobby
from tidewheel.elastic.membership import Membership
from tidewheel.elastic.messages import (
    Beat,
    CoordinatorMessage,
    Hello,
    Join,
    Leaving,
    Left,
    MemoryPlacement,
    Probed,
    StepDone,
    WorkerEvent,
    WorkerMessage,
)
from tidewheel.elastic.node_health import NodeHealth, clock_problem, past_failures
from tidewheel.elastic.node_watch import NodeChanges, NodeWatch
from tidewheel.elastic.outgoing import ANY_RANK
from tidewheel.elastic.placement_orders import PlacementOrders
from tidewheel.elastic.policy import Backoff, Recovery, budget_of, resizer_of
from tidewheel.elastic.process_log import LogTarget, ProcessLog
from tidewheel.elastic.run_events import Pace, RunEvents, Snapshot, completed
from tidewheel.elastic.server import Server
from tidewheel.elastic.silence import beat_seconds
from tidewheel.elastic.slow import judged
from tidewheel.elastic.start_times import CONTROLLER, COORDINATOR, FORMED, RESTORED, STEPPED, WORKERS, StartTimes
from tidewheel.elastic.supervision import Supervisor
from tidewheel.errors import ClusterError, OwnershipError
from tidewheel.ownership import Renewal
from tidewheel.train.elastic_config import ElasticConfig
from tidewheel.train.history import HistoryWriter, RunHistory, read_history
from tidewheel.train.logs.line import HERE

T = TypeVar("T")
logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.5


class Coordinator:
    """The actor. `Membership` decides, in the server's thread; this class connects it to the outside.

    Args:
        run_uri: the run's folder. Generations and steps recorded there are continued.
        elastic: time limits and policies.
        sizes: legal numbers of workers.
        epoch: epoch in which the driver owns the run; it determines the numbers of generations.
        memory_tier: keep a memory agent on every node that has workers; needs a Ray cluster.
        local_disk: see `Agents`.
        log: run whose logs/ gets the log of this process, and of the agents; None to keep none.
        node: id of this process's node, for the log.
        tensor: ranks of a tensor-parallel group, which stay on one node if they can.
        group: ranks of a replica group, which goes on when another one loses a worker; 0: there are none.
        node_history: folder of the nodes' failures, which several runs share; "" to forget them.
        called: Unix time at which the driver was asked to train; 0.0: do not measure the start.
        owned: Unix time since which it owns the run.
    """

    def __init__(self, run_uri: str, elastic: ElasticConfig | None = None, sizes: tuple[int, ...] = (1,), *,
                 epoch: int = 0, memory_tier: bool = False, local_disk: tuple[Path, int] | None = None,
                 log: LogTarget | None = None, node: str = "", tensor: int = 1, group: int = 0,
                 node_history: str = "", called: float = 0.0, owned: float = 0.0) -> None:
        self._start_times = StartTimes(called, owned)
        self._log = ProcessLog(log, "coordinator", node)
        elastic = elastic or ElasticConfig()
        first = first_generation(epoch)
        self._elastic = elastic
        self._epoch = epoch
        self._run = storage.store(run_uri)
        self._past = read_history(self._run)
        self._past_writer = HistoryWriter(self._run, self.past)
        self._events = RunEvents(self._run, order=first)
        self._renewal: Renewal | None = None
        self._snapshot = Snapshot()
        self._changing = threading.Lock()  # calls and the membership's decisions change the snapshot, in other threads
        self._failed = -2  # newest generation whose failure is recorded
        self._pace = Pace()
        self._known = set[str]()
        self._cut = set[str]()
        self._losses = set[str]()
        self._cut_on = set[str]()  # nodes of workers that were cut off since `_look_for_agents`
        self._nodes = NodeWatch(elastic, self.event)
        self._node_history = NodeHistory(storage.store(node_history), run_uri) if node_history else None
        self.event("driver_start", {"first_generation": first, "epoch": epoch})
        self._reach(COORDINATOR, time.time())
        self._health = NodeHealth(elastic.node_checks, self, past_failures(node_history, elastic.node_checks),
                                  history=self._node_history, hosts=self._nodes.hosts)
        self._membership = Membership(
            sizes, resizer_of(elastic, sizes), budget_of(elastic), self, limits=limits_of(elastic),
            blame=Blame(Backoff(elastic.readmit_after_seconds, elastic.readmit_at_most_seconds)),
            health=self._health, first_generation=first, furthest_step=self._past.step, tensor=tensor, group=group)
        self._server: Server | None = None
        self._rendezvous: tuple[str, int] = ("", 0)
        self._token = secrets.token_hex(16)
        self._needs_store = max(sizes) > 1
        self._store: Any = None
        self._agents = AgentSupervisor(Agents(run_uri, log, local_disk), self.event) if memory_tier else None
        self._links = LinkChecks(elastic.node_checks.slow_link_factor, self._agents.agents, self.event) \
            if self._agents is not None and elastic.node_checks.slow_link_factor else None
        self._placements = PlacementOrders()
        self._lobby = Lobby(self._hello, self._is_ready)
        self._up = threading.Event()
        self._problem = ""
        self._ended = threading.Event()
        self._supervisor = Supervisor(self.event)  # of the thread that watches the nodes

    def start(self, host: str) -> None:
        """Start to listen, to renew the ownership of the run and to watch the nodes; return at once.

        Args:
            host: address of this machine.
        """
        self._renewal = Renewal(self._run, self._epoch, self._lose)
        threading.Thread(target=self._start, args=(host,), name="start", daemon=True).start()
        threading.Thread(target=self._watch, name="node watch", daemon=True).start()
        if self._links is not None:
            self._links.start()
        self._past_writer.start()

    def endpoint(self) -> Endpoint:
        """Wait until the coordinator listens, and return where workers connect.

        Raises:
            ClusterError: the coordinator cannot listen.
        """
        self._up.wait()
        if self._server is None:
            raise ClusterError(f"the coordinator cannot listen: {self._problem}", where="elastic.coordinator",
                               fix="the driver's machine must be able to listen at its own address")
        return self._endpoint_of(self._server)

    def _endpoint_of(self, server: Server) -> Endpoint:
        return Endpoint(server.address, self._token, self._snapshot.generation >= 0, self._run.uri, self._epoch,
                        self._membership.largest)

    def relay(self, node: str) -> tuple[str, int] | None:
        """Return where the workers of a node connect to share a connection; None if they connect directly."""
        return self._agents.relay(node) if self._agents is not None else None

    # -- calls of the driver and of Ray Train's controller -----------------------------------------
    def snapshot(self) -> Snapshot:
        """Return the present state of the run."""
        return self._snapshot

    def news(self) -> list[dict[str, Any]]:
        """Return the events since the last call that the driver prints."""
        return self._events.news()

    def lost(self) -> OwnershipError | None:
        """Return the error by which this driver lost the run; None while it owns the run."""
        return self._renewal.lost if self._renewal is not None else None

    def _lose(self, error: OwnershipError) -> None:
        self.event("taken_over", {"generation": self._snapshot.generation, "error": error.what})
        self._decide(lambda: self._membership.give_up(error.what))

    def controller_started(self) -> None:
        """Note that Ray Train's controller is up."""
        self._reach(CONTROLLER, time.time())

    def _reach(self, moment: str, unix: float) -> None:
        started = self._start_times.reach(moment, unix)
        if started is not None:
            self.event("started", started)

    def say(self, state: str) -> None:
        """Set the state that the driver shows."""
        self._show(state=state)

    def _show(self, **changes: Any) -> None:
        """Change fields of the snapshot. A lost change of `generation` would hide all steps of that generation."""
        with self._changing:
            self._snapshot = replace(self._snapshot, **changes)

    def expect(self, workers: dict[str, str], anew: bool = False) -> None:
        """Note workers that are being started.

        Args:
            workers: node id by worker name.
            anew: the workers are a new group, and the old group's workers no longer exist.
        """
        self._reach(WORKERS, time.time())
        if self._agents is not None:
            self._agents.want(workers.values())

        def note() -> None:
            self._known.update(workers)  # one that dies before it connects is lost like any other
            self._membership.expect(workers, time.monotonic(), anew=anew)

        self._decide(note)

    def stop_run(self) -> tuple[bool, int | None]:
        """Let the workers save at the next step boundary and train no further.

        Call it again to follow the save: return whether the workers train, and the step once it is saved.
        """
        return self._decide(self._membership.stop_run)

    def past(self) -> RunHistory:
        """Return the run's history for a new worker or the next driver."""
        return replace(self._past, step=self._membership.furthest_step, time=time.time(),
                       generation=max(self._past.generation, self._snapshot.generation))

    def standing_by(self) -> int:
        """Return the number of connected workers without a rank."""
        generation = self._membership.generation  # once: the server's thread may end it meanwhile
        members = generation.ranks if generation is not None else {}
        return sum(worker.connected and worker.name not in members
                   for worker in list(self._membership.workers.values()))

    def fenced(self) -> set[str]:
        """Return the workers that were cut off, whose processes must end."""
        return set(self._cut)

    def nodes_with_losses(self) -> set[str]:
        """Return the nodes on which workers ended before the run was over, perhaps with unwritten log lines."""
        return set(self._losses)

    def avoided(self) -> set[str]:
        """Return the nodes on which no worker may be started: too slow, blamed for failures, or failing often."""
        def out() -> set[str]:
            often = self._health.avoid(self._nodes.slots, self._membership.sizes)
            return self._membership.nodes_out(time.monotonic()) | often

        if not self._up.is_set():  # no worker is known yet, so only the nodes' history counts
            return self._health.avoid(self._nodes.slots, self._membership.sizes)
        return self._decide(out)

    def nodes_out(self) -> set[str]:
        """Return the nodes whose workers others shall replace: too slow, or blamed for failures."""
        return self._decide(lambda: self._membership.nodes_out(time.monotonic()))

    def raised(self, worker: str, kind: str, text: str, fatal: bool) -> bool:
        """Return whether the run continues without a worker whose function raised an error outside any generation.

        Args:
            worker: its name.
            kind: class of the error.
            text: its message.
            fatal: a restart does not fix it.
        """
        return self._decide(lambda: self._membership.raised(worker, kind, text, time.monotonic(), fatal=fatal))

    def dead(self, names: list[str], why: str) -> list[str]:
        """Note workers that Ray reports as dead; return those whose loss the coordinator handles itself."""
        def note() -> list[str]:
            known = [name for name in names if name in self._known]
            for name in known:
                self.fence(name)
                self._membership.lost(name, why, time.monotonic())
            return known if self._membership.phase is not Phase.FAILED else []

        return self._decide(note)

    def failed(self, text: str, ranks: list[int], retryable: bool, lost: bool = False) -> str:
        """Return the `Recovery` for a failure of Ray Train's group of workers.

        Args:
            text: the error.
            ranks: the ranks that failed.
            retryable: a restart may help.
            lost: workers were lost.
        """
        def decide() -> Recovery:
            recorded = self._failed == self._snapshot.generation
            recovery = self._membership.recovery
            if not retryable or self.lost() is not None:
                recovery = Recovery.NONE
            elif not recorded:
                recovery = self._membership.failures.charge(counted=not lost)
            if recovery is Recovery.IN_PLACE:
                recovery = Recovery.KEPT
            if not recorded:
                self.event("failure", {"generation": self._snapshot.generation, "ranks": ranks, "error": text,
                                       "recovery": str(recovery), "restart": recovery is not Recovery.NONE,
                                       "step": self._snapshot.progress.get("step", 0)})
            return recovery

        recovery = self._decide(decide)
        self.say("restarting" if recovery is not Recovery.NONE else "failed")
        return str(recovery)

    def end(self) -> None:
        """Write the collected events and stop; the driver's last call.

        Raises:
            StorageError: the store fails, and some events are lost.
        """
        self._ended.set()
        if self._links is not None:
            self._links.stop()
        if self._renewal is not None:
            self._renewal.close()
        if self._server is not None:
            self._server.stop()
        self._past_writer.end()
        if self._node_history is not None:
            self._node_history.close()
        try:
            self._events.flush()
            if self._agents is not None:
                self._agents.end(over=self._membership.phase is Phase.OVER)
        finally:
            logger.info("the coordinator ends: the run is %s", self._membership.phase)
            self._log.close()

    def _decide(self, function: Callable[[], T]) -> T:
        """Call a function in the thread of the membership's decisions, and return its result."""
        self._up.wait()
        return function() if self._server is None else self._server.call(function)

    # -- the membership's outbox -------------------------------------------------------------------
    def send(self, worker: str, message: CoordinatorMessage) -> None:
        """Send a message to a worker."""
        self.send_all((worker,), message)

    def send_all(self, workers: Collection[str], message: CoordinatorMessage) -> None:
        """Send a message to several workers."""
        if self._server is not None:
            self._server.send_all(workers, message)

    def fence(self, worker: str) -> None:
        """Cut off a worker."""
        logger.info("worker %s is cut off", worker)
        self._cut.add(worker)
        self._note_loss(worker)
        self._lobby.leave(worker)
        fenced = self._membership.workers.get(worker)
        if fenced is not None:
            self._cut_on.add(fenced.node)
        if self._server is not None:
            self._server.cut(worker)

    def unheard(self, worker: str) -> float:
        """Return the seconds for which a worker that is connected has acknowledged no message; 0.0 if none waits."""
        return self._server.unheard(worker) if self._server is not None else 0.0

    def event(self, kind: str, detail: dict[str, Any], at: float | None = None) -> None:
        """Record an event.

        Args:
            kind: its name.
            detail: its fields.
            at: monotonic seconds; None: now.
        """
        unix = time.time() if at is None else time.time() - (time.monotonic() - at)
        detail = completed(kind, detail, unix, self._nodes.hosts)
        logger.info("event %s %s", kind, json.dumps(detail, default=str))
        self._record(kind, detail, unix)
        if kind == "failure":
            self._failed = int(detail["generation"])

    def form(self, generation: Generation) -> None:
        """Tell the members of a new generation to join it."""
        state = "starting" if self._snapshot.generation < 0 else "restarting"
        number, size = generation.number, len(generation.members)
        self._pace = Pace()
        self._look_for_agents()
        self._placements.begin(self._placement(generation), self._membership.workers)
        HERE.begin(number, 0)
        logger.info("generation %d begins with %d workers", number, size)
        self._reach(FORMED, time.time())
        self._show(generation=number, size=size, state=state)
        if self._server is None:
            return
        order = Join(number, ANY_RANK, size, self._rendezvous, None, self.past(),
                     beat_seconds(size, self._elastic.heartbeat_seconds))
        for placement, ranks in self._placements.of(generation.ranks):
            self._server.join(ranks, replace(order, memory=placement))

    def _record(self, kind: str, detail: dict[str, Any], unix: float) -> None:
        self._events.record(kind, detail, unix)
        if kind == "failure":
            self._past = replace(self._past, failures=self._past.failures + 1)

    # -- the server's handler ----------------------------------------------------------------------
    def opened(self, hello: Hello) -> None:
        """Admit a worker, once the agent of its node is known and has tested its links."""
        logger.info("worker %s on node %s is connected", hello.name, hello.node)
        self._known.add(hello.name)
        self._placements.forget(hello.name)
        if self._agents is not None and not self._is_ready(hello.node):
            self._agents.want([hello.node])
        self._lobby.enter(hello)

    def _is_ready(self, node: str) -> bool:
        """Return whether the agent of a node is known and has tested its links, or none is needed."""
        if self._agents is None:
            return True
        return self._agents.has(node) and (self._links is None or self._links.tested(node))

    def _hello(self, hello: Hello) -> None:
        problem = hello.problem or (self._links.problem(hello.node) if self._links is not None else "")
        ask = bool(clock_problem(hello.clock, time.time(), self._elastic.node_checks))
        self._membership.hello(hello.name, hello.node, time.monotonic(), spot=hello.spot, device=hello.device,
                               problem=problem, ask=ask)

    def received(self, name: str, message: WorkerMessage) -> None:
        """Act on a message of a worker."""
        now = time.monotonic()
        membership = self._membership
        match message:
            case StepDone():
                self._step(message)
                membership.beat(name, message.generation, message.step, now)
            case WorkerEvent():
                detail = message.detail
                if message.kind == "slow_worker":
                    detail = judged(detail, self._elastic.slow_worker, membership)
                self._record(message.kind, detail, message.time)
                if message.kind in ("start", "resume"):
                    self._reach(RESTORED, message.time)
                if message.kind == "memory_tier_lost" and membership.phase is Phase.RUNNING:
                    self._agent_lost(name)
            case Leaving():
                membership.leaving(name)
            case Probed(problem, clock):
                worker = membership.workers.get(name)
                asked = now - (worker.probed_at if worker and worker.probed_at is not None else now)
                problem = problem or clock_problem(clock, time.time() - asked, self._elastic.node_checks)
                membership.probed(name, problem, now)

    def left(self, names: Sequence[str], report: Left) -> None:
        """Act on equal reports of workers that have left their generation."""
        self._membership.left(names, report, time.monotonic())

    def beats(self, beats: Iterable[tuple[str, Beat]]) -> None:
        """Act on heartbeats of workers."""
        now = time.monotonic()
        for name, beat in beats:
            self._membership.beat(name, beat.generation, beat.step, now, work=beat.work, aborts=beat.aborts)

    def returned(self, name: str, seconds: float) -> None:
        """Record that a worker has reconnected."""
        logger.info("worker %s has reconnected after %.3f s", name, seconds)
        self._membership.beat(name, -1, 0, time.monotonic())
        worker = self._membership.workers.get(name)
        self._record("worker_reconnected", {"worker": name, "node": worker.node if worker else "",
                                            "seconds": round(seconds, 3)}, time.time())

    def closed(self, name: str) -> None:
        """Treat a worker whose session is over as lost."""
        logger.info("the connection of worker %s is closed", name)
        self._lobby.leave(name)
        self._note_loss(name)
        self._membership.lost(name, "its process has ended, or is cut off", time.monotonic())

    def _note_loss(self, name: str) -> None:
        worker = self._membership.workers.get(name)
        if worker is not None and self._membership.phase is not Phase.OVER:
            self._losses.add(worker.node)

    def tick(self) -> None:
        """Act on the time."""
        now = time.monotonic()
        self._lobby.look(now)
        self._membership.tick(now)
        self._look_for_agents()

    def _look_for_agents(self) -> None:
        """Look again for the agents of nodes whose workers were all cut off: such a node may be stopped.

        This is done once for all workers of a rack that is lost, and before the next generation is told of agents.
        """
        nodes, self._cut_on = self._cut_on, set()
        if self._agents is None or not nodes:
            return
        for node in nodes.difference(worker.node for worker in self._membership.workers.values()):
            self._agents.lost(node, for_good=False)

    def _placement(self, generation: Generation) -> MemoryPlacement | None:
        """Return the memory agents of a generation."""
        if self._agents is None:
            return None
        return self._agents.placement([generation.nodes[name] for name in generation.members])

    def _agent_lost(self, name: str) -> None:
        """Replace the agent on a worker's node for the next generation."""
        worker = self._membership.workers.get(name)
        if self._agents is not None and worker is not None:
            self._agents.lost(worker.node, for_good=False)

    def _step(self, done: StepDone) -> None:
        if done.generation == self._snapshot.generation:
            if not self._start_times.complete:
                self._reach(STEPPED, time.time())
            HERE.step = done.step
            progress = {"step": done.step, "steps": done.steps, **done.metrics}
            self._show(progress=progress, state="running")
            self._membership.remaining_seconds = self._pace.remaining(done.step, done.steps)

    # -- threads -----------------------------------------------------------------------------------
    def _start(self, host: str) -> None:
        try:
            server = Server(host, self._token, self, workers=self._membership.largest)
            server.start()
            if self._needs_store:  # its import takes seconds, in which the workers start too
                from tidewheel.elastic.process_group import serve_store

                self._store = serve_store(host)
                self._rendezvous = (host, self._store.port)
            self._server = server
            if self._agents is not None and self._elastic.relayed:
                self._agents.relay_to(self._endpoint_of(server))
            logger.info("the coordinator listens at %s:%d", *server.address)
        except Exception as error:  # `endpoint` raises it
            self._problem = f"{type(error).__name__}: {error}"
            logger.exception("the coordinator cannot listen")
        self._up.set()

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_SECONDS):
            self._supervisor.call("node watch", self._look)  # Ray's control store may be unavailable for a moment
            self._supervisor.call("log", self._events.flush_due)  # nothing else writes the last event of a burst

    def _look(self) -> None:
        changes = self._nodes.look()
        if self._agents is not None:
            self._agents.located(changes.domains)
        if self._up.is_set():
            self._decide(lambda: self._note_nodes(changes))

    def _note_nodes(self, changes: NodeChanges) -> None:
        self._membership.drain(changes.draining)
        if self._agents is not None:
            for node in changes.lost:
                self._agents.lost(node, for_good=True)
        for worker in list(self._membership.workers.values()):
            if worker.node in changes.lost:
                self.fence(worker.name)
                self._membership.lost(worker.name, f"node {changes.lost[worker.node]} is gone", time.monotonic())


def actor_name(run_uri: str) -> str:
    """Return the name of a run's coordinator. It is the same for two drivers that train the same run."""
    return f"run-{hashlib.sha256(run_uri.encode()).hexdigest()[:16]}"
