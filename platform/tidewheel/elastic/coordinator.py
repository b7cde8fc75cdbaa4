"""The run's coordinator: one small actor beside the driver that outlives every generation of workers.

Workers connect to it directly (`server`). It forms the generations (`membership`) and tells the workers (`dispatcher`),
hosts the store at which their ranks meet, watches the nodes, keeps the newest progress for the driver and writes
events.jsonl (`run_record`).
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tidewheel import storage
from tidewheel.cluster.node_history import NodeHistory
from tidewheel.commit_log import first_generation
from tidewheel.elastic.agent_supervisor import AgentSupervisor
from tidewheel.elastic.agents import Agents
from tidewheel.elastic.blame import Blame
from tidewheel.elastic.connection import Endpoint
from tidewheel.elastic.dispatcher import Dispatcher
from tidewheel.elastic.generation import Phase, limits_of
from tidewheel.elastic.link_checks import LinkChecks
from tidewheel.elastic.membership import Membership
from tidewheel.elastic.node_agents import NodeAgents
from tidewheel.elastic.node_health import NodeHealth, past_failures
from tidewheel.elastic.node_watch import NodeWatch
from tidewheel.elastic.policy import Backoff, Recovery, budget_of, resizer_of
from tidewheel.elastic.process_log import LogTarget, ProcessLog
from tidewheel.elastic.run_events import Snapshot
from tidewheel.elastic.run_record import RunRecord
from tidewheel.elastic.server import Server
from tidewheel.elastic.start_times import CONTROLLER, COORDINATOR, WORKERS, StartTimes
from tidewheel.elastic.supervision import Supervisor
from tidewheel.errors import ClusterError, OwnershipError
from tidewheel.ownership import Renewal
from tidewheel.train.elastic_config import ElasticConfig
from tidewheel.train.history import HistoryWriter, RunHistory

T = TypeVar("T")
logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.5


class Coordinator:
    """The actor: it starts and ends the parts, and takes the calls of the driver and of Ray Train's controller.

    `Membership` decides, and `Dispatcher` connects it to the workers, both in the server's thread.

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
        self._log = ProcessLog(log, "coordinator", node)
        elastic = elastic or ElasticConfig()
        first = first_generation(epoch)
        self._elastic = elastic
        self._epoch = epoch
        self._run = storage.store(run_uri)
        self._nodes = NodeWatch(elastic, self.event)
        self._record = RunRecord(self._run, first, StartTimes(called, owned), self._nodes.hosts)
        self._past_writer = HistoryWriter(self._run, self.past)
        self._node_history = NodeHistory(storage.store(node_history), run_uri) if node_history else None
        self.event("driver_start", {"first_generation": first, "epoch": epoch})
        self._record.reach(COORDINATOR, time.time())
        agents = AgentSupervisor(Agents(run_uri, log, local_disk), self.event) if memory_tier else None
        factor = elastic.node_checks.slow_link_factor
        links = LinkChecks(factor, agents.agents, self.event) if agents is not None and factor else None
        self._agents = NodeAgents(agents, links)
        self._dispatcher = Dispatcher(elastic, self._record, self._agents)
        past = past_failures(node_history, elastic.node_checks)
        self._health = NodeHealth(elastic.node_checks, self._dispatcher, past, history=self._node_history,
                                  hosts=self._nodes.hosts)
        self._membership = Membership(
            sizes, resizer_of(elastic, sizes), budget_of(elastic), self._dispatcher, limits=limits_of(elastic),
            blame=Blame(Backoff(elastic.readmit_after_seconds, elastic.readmit_at_most_seconds)),
            health=self._health, first_generation=first, furthest_step=self._record.past_step, tensor=tensor,
            group=group)
        self._dispatcher.membership = self._membership
        self._renewal: Renewal | None = None
        self._token = secrets.token_hex(16)
        self._needs_store = max(sizes) > 1
        self._store: Any = None
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
        self._agents.start()
        self._past_writer.start()

    def endpoint(self) -> Endpoint:
        """Wait until the coordinator listens, and return where workers connect.

        Raises:
            ClusterError: the coordinator cannot listen.
        """
        self._up.wait()
        if self._dispatcher.server is None:
            raise ClusterError(f"the coordinator cannot listen: {self._problem}", where="elastic.coordinator",
                               fix="the driver's machine must be able to listen at its own address")
        return self._endpoint_of(self._dispatcher.server)

    def _endpoint_of(self, server: Server) -> Endpoint:
        return Endpoint(server.address, self._token, self._record.snapshot.generation >= 0, self._run.uri, self._epoch,
                        self._membership.largest)

    def relay(self, node: str) -> tuple[str, int] | None:
        """Return where the workers of a node connect to share a connection; None if they connect directly."""
        return self._agents.relay(node)

    # -- calls of the driver and of Ray Train's controller -----------------------------------------
    def snapshot(self) -> Snapshot:
        """Return the present state of the run."""
        return self._record.snapshot

    def news(self) -> list[dict[str, Any]]:
        """Return the events since the last call that the driver prints."""
        return self._record.news()

    def event(self, kind: str, detail: dict[str, Any], at: float | None = None) -> None:
        """Record an event.

        Args:
            kind: its name.
            detail: its fields.
            at: monotonic seconds; None: now.
        """
        self._record.event(kind, detail, at)

    def say(self, state: str) -> None:
        """Set the state that the driver shows."""
        self._record.show(state=state)

    def lost(self) -> OwnershipError | None:
        """Return the error by which this driver lost the run; None while it owns the run."""
        return self._renewal.lost if self._renewal is not None else None

    def _lose(self, error: OwnershipError) -> None:
        self.event("taken_over", {"generation": self._record.snapshot.generation, "error": error.what})
        self._decide(lambda: self._membership.give_up(error.what))

    def controller_started(self) -> None:
        """Note that Ray Train's controller is up."""
        self._record.reach(CONTROLLER, time.time())

    def expect(self, workers: dict[str, str], anew: bool = False) -> None:
        """Note workers that are being started.

        Args:
            workers: node id by worker name.
            anew: the workers are a new group, and the old group's workers no longer exist.
        """
        self._record.reach(WORKERS, time.time())
        self._agents.want(workers.values())
        self._decide(lambda: self._dispatcher.expect(workers, anew=anew))

    def stop_run(self) -> tuple[bool, int | None]:
        """Let the workers save at the next step boundary and train no further.

        Call it again to follow the save: return whether the workers train, and the step once it is saved.
        """
        return self._decide(self._membership.stop_run)

    def past(self) -> RunHistory:
        """Return the run's history for a new worker or the next driver."""
        return self._record.history(self._membership.furthest_step)

    def standing_by(self) -> int:
        """Return the number of connected workers without a rank."""
        generation = self._membership.generation  # once: the server's thread may end it meanwhile
        members = generation.ranks if generation is not None else {}
        return sum(worker.connected and worker.name not in members
                   for worker in list(self._membership.workers.values()))

    def fenced(self) -> set[str]:
        """Return the workers that were cut off, whose processes must end."""
        return set(self._dispatcher.cut)

    def nodes_with_losses(self) -> set[str]:
        """Return the nodes on which workers ended before the run was over, perhaps with unwritten log lines."""
        return set(self._dispatcher.nodes_with_losses)

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
        return self._decide(lambda: self._dispatcher.dead(names, why))

    def failed(self, text: str, ranks: list[int], retryable: bool, lost: bool = False) -> str:
        """Return the `Recovery` for a failure of Ray Train's group of workers.

        Args:
            text: the error.
            ranks: the ranks that failed.
            retryable: a restart may help.
            lost: workers were lost.
        """
        recovery = self._decide(lambda: self._dispatcher.failed(
            text, ranks, retryable=retryable and self.lost() is None, lost=lost))
        self.say("restarting" if recovery is not Recovery.NONE else "failed")
        return str(recovery)

    def end(self) -> None:
        """Write the collected events and stop; the driver's last call.

        Raises:
            StorageError: the store fails, and some events are lost.
        """
        self._ended.set()
        self._agents.stop_tests()
        if self._renewal is not None:
            self._renewal.close()
        if self._dispatcher.server is not None:
            self._dispatcher.server.stop()
        self._past_writer.end()
        if self._node_history is not None:
            self._node_history.close()
        try:
            self._record.flush()
            self._agents.end(over=self._membership.phase is Phase.OVER)
        finally:
            logger.info("the coordinator ends: the run is %s", self._membership.phase)
            self._log.close()

    # -- threads -----------------------------------------------------------------------------------
    def _decide(self, function: Callable[[], T]) -> T:
        """Call a function in the thread of the membership's decisions, and return its result."""
        self._up.wait()
        server = self._dispatcher.server
        return function() if server is None else server.call(function)

    def _start(self, host: str) -> None:
        try:
            server = Server(host, self._token, self._dispatcher, workers=self._membership.largest)
            server.start()
            if self._needs_store:  # its import takes seconds, in which the workers start too
                from tidewheel.elastic.process_group import serve_store

                self._store = serve_store(host)
                self._dispatcher.rendezvous = (host, self._store.port)
            self._dispatcher.server = server
            if self._elastic.relayed:
                self._agents.relay_to(self._endpoint_of(server))
            logger.info("the coordinator listens at %s:%d", *server.address)
        except Exception as error:  # `endpoint` raises it
            self._problem = f"{type(error).__name__}: {error}"
            logger.exception("the coordinator cannot listen")
        self._up.set()

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_SECONDS):
            self._supervisor.call("node watch", self._look)  # Ray's control store may be unavailable for a moment
            self._supervisor.call("log", self._record.flush_due)  # nothing else writes the last event of a burst

    def _look(self) -> None:
        changes = self._nodes.look()
        self._agents.located(changes.domains)
        if self._up.is_set():
            self._decide(lambda: self._dispatcher.nodes_changed(changes))


def actor_name(run_uri: str) -> str:
    """Return the name of a run's coordinator. It is the same for two drivers that train the same run."""
    return f"run-{hashlib.sha256(run_uri.encode()).hexdigest()[:16]}"
