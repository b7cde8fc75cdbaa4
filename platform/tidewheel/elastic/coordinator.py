"""The run's coordinator: one small actor beside the driver that outlives every generation of workers.

It hears from the workers over connections of its own, forms the generations (`membership`), keeps the store at which
their ranks meet, watches the nodes, keeps the newest progress for the driver and writes events.jsonl.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from tidewheel import storage
from tidewheel.commit_log import first_generation
from tidewheel.elastic.agent_supervisor import AgentSupervisor
from tidewheel.elastic.agents import Agents
from tidewheel.elastic.blame import Blame
from tidewheel.elastic.channel import Message, Server
from tidewheel.elastic.membership import ExitReason, Limits, Membership, Phase
from tidewheel.elastic.nodes import Node
from tidewheel.elastic.policy import Backoff, FailureBudget, Recovery, Resizer
from tidewheel.elastic.slow import judge
from tidewheel.elastic.supervision import Supervisor
from tidewheel.errors import ClusterError, OwnershipError
from tidewheel.jsonlog import JsonLog
from tidewheel.ownership import Renewal
from tidewheel.placement import failure_domain
from tidewheel.train.config import ElasticConfig
from tidewheel.train.past import Past, PastWriter, read_past

T = TypeVar("T")

WATCH_SECONDS = 0.5
AGENT_SECONDS = 10.0
"""A worker waits this long for the memory agent of its node, then does without."""
#: Events that the driver tells people at once; the rest is for the report.
NEWSWORTHY = frozenset({"failure", "node_lost", "node_joined", "node_draining", "resize", "resize_called_off", "resume",
                        "recovered", "checkpoint_refused", "save_failed", "straggler", "straggler_over", "slow_worker",
                        "sink_failed", "guard", "rollback", "hang", "shard_read_again", "storage_away",
                        "memory_refused", "memory_tier_lost", "data_wait", "data_came", "worker_left_out",
                        "worker_readmitted", "taken_over", "setting_changed", "control_error"})


@dataclass(frozen=True)
class Snapshot:
    """The run as the coordinator knows it."""

    generation: int = -1
    """Number of the generation that runs or ran last; -1 before the first."""
    size: int = 0
    """Its workers."""
    state: str = "starting"
    """For people: starting, running, saving, resizing, restarting."""
    progress: dict[str, Any] = field(default_factory=dict)
    """Newest of rank 0: step, steps, loss, tokens_per_second, tokens, world_size."""


class Coordinator:
    """The actor. `Membership` decides, in the thread of the channel; here is what connects it to the world.

    Args:
        run_uri: the run's folder; what it already says about generations and steps is continued.
        elastic: limits.
        sizes: legal numbers of workers.
        epoch: in which its driver owns the run; all numbers of worker groups are those of this epoch.
        memory_tier: keep a memory agent on every node that has workers; takes a Ray cluster.
    """

    def __init__(self, run_uri: str, elastic: ElasticConfig | None = None, sizes: tuple[int, ...] = (1,), *,
                 epoch: int = 0, memory_tier: bool = False) -> None:
        store, elastic = storage.store(run_uri), elastic or ElasticConfig()
        self._past = read_past(store)
        self._writer = PastWriter(store, self.past)
        first = first_generation(epoch)
        self._run, self._epoch = store, epoch
        self._renewal: Renewal | None = None
        self._log = JsonLog(store, "events.jsonl", order=first)
        self._news: deque[dict[str, Any]] = deque(maxlen=200)
        self._snapshot, self._failed, self._pace = Snapshot(), -2, Pace()
        self._known, self._cut = set[str](), set[str]()
        self._losses: set[str] = set()
        self.event("driver_start", {"first_generation": first, "epoch": epoch})
        resizer = Resizer(sizes, join_wait_seconds=elastic.join_wait_seconds,
                          interval_seconds=elastic.resize_interval_seconds, patience_seconds=elastic.hold_seconds)
        limits = Limits(heartbeat=elastic.heartbeat_seconds, leave=elastic.leave_seconds,
                        gather=elastic.start_timeout_seconds)
        budget = FailureBudget(
            max_failures=elastic.max_failures, max_without_progress=elastic.max_failures_without_progress,
            first=Recovery(elastic.recovery), backoff=Backoff(elastic.backoff_seconds, elastic.max_backoff_seconds))
        blame = Blame(Backoff(elastic.readmit_after_seconds, elastic.readmit_at_most_seconds))
        self._elastic = elastic
        self._membership = Membership(sizes, resizer, budget, self,
                                      limits=limits, blame=blame, first_generation=first,
                                      furthest_step=self._past.step)
        self._channel: Server | None = None
        self._rendezvous: tuple[str, int] = ("", 0)
        self._token, self._several = secrets.token_hex(16), max(sizes) > 1
        self._store: Any = None
        self._agents = AgentSupervisor(Agents(run_uri)) if memory_tier else None
        self._waiting: dict[str, tuple[Message, float]] = {}  # whose node has no agent yet: hello, since when
        self._up, self._problem = threading.Event(), ""
        self._ended = threading.Event()
        self._supervisor = Supervisor(self.event)  # of the thread that watches the nodes

    def start(self, host: str) -> None:
        """Listen at `host`, this machine's address, own the run and watch the nodes; returns at once."""
        self._renewal = Renewal(self._run, self._epoch, self._lose)
        threading.Thread(target=self._start, args=(host,), name="start", daemon=True).start()
        threading.Thread(target=self._watch, name="node watch", daemon=True).start()  # asks Ray
        self._writer.start()

    def place(self) -> dict[str, Any]:
        """Where workers connect: "address", "token", and whether a generation "runs" now."""
        self._up.wait()
        if self._channel is None:
            raise ClusterError(f"the coordinator cannot listen: {self._problem}", where="elastic.coordinator",
                               mend="the driver's machine must be able to listen at its own address")
        return {"address": self._channel.address, "token": self._token, "runs": self._snapshot.generation >= 0}

    # -- the driver and the controller ---------------------------------------------------------------
    def snapshot(self) -> Snapshot:
        """The run now."""
        return self._snapshot

    def news(self) -> list[dict[str, Any]]:
        """What is worth telling since the last call; the driver asks."""
        told = []
        while self._news:
            told.append(self._news.popleft())
        return told

    def lost(self) -> OwnershipError | None:
        """Return why the run is no longer this driver's; None while it is."""
        return self._renewal.lost if self._renewal is not None else None

    def _lose(self, error: OwnershipError) -> None:
        self.event("taken_over", {"generation": self._snapshot.generation, "error": error.what})
        self._decide(lambda: self._membership.give_up(error.what))

    def say(self, state: str) -> None:
        """What people shall see as the run's state."""
        self._snapshot = replace(self._snapshot, state=state)

    def expect(self, workers: dict[str, str], anew: bool = False) -> None:
        """These workers, by name, are being started on these nodes; see `Membership.expect`."""
        if self._agents is not None:
            self._agents.want(workers.values())
        self._decide(lambda: self._membership.expect(workers, time.monotonic(), anew=anew))

    def stop_run(self) -> tuple[bool, int | None]:
        """The workers shall save at the next step boundary and train no further; asked again it tells how far that is:
        whether they train, and the step once it is saved."""
        return self._decide(self._membership.stop_run)

    def past(self) -> Past:
        """What a worker that starts, or the next driver, must know of the run."""
        return replace(self._past, step=self._membership.furthest_step, time=time.time(),
                       generation=max(self._past.generation, self._snapshot.generation))

    def standing_by(self) -> int:
        """Workers that are warm and have no rank."""
        members = self._membership.generation.members if self._membership.generation else ()
        return sum(worker.connected and worker.name not in members
                   for worker in list(self._membership.workers.values()))

    def fenced(self) -> set[str]:
        """Workers that were cut off and whose processes must end."""
        return set(self._cut)

    def nodes_with_losses(self) -> set[str]:
        """Nodes on which worker processes ended before the run was over: they may not have written all they said."""
        return set(self._losses)

    def avoided(self) -> set[str]:
        """Nodes on which no worker shall be started: too slow, or to blame for failures."""
        return self._decide(lambda: self._membership.nodes_out(time.monotonic()))

    def raised(self, worker: str, kind: str, text: str, fatal: bool) -> bool:
        """A worker's function ended by an error outside any generation: whether the run goes on without it."""
        return self._decide(lambda: self._membership.raised(worker, kind, text, time.monotonic(), fatal=fatal))

    def dead(self, names: list[str], why: str) -> list[str]:
        """Ray says that these workers are dead; those whose loss is dealt with here."""
        def tell() -> list[str]:
            known = [name for name in names if name in self._known]
            for name in known:
                self.fence(name)
                self._membership.lost(name, why, time.monotonic())
            return known if self._membership.phase is not Phase.FAILED else []

        return self._decide(tell)

    def failed(self, text: str, ranks: list[int], retryable: bool, placement: bool, lost: bool = False) -> str:
        """Ray Train's group of workers has failed, `lost`: by the loss of workers; the `Recovery` it shall try."""
        def judge() -> Recovery:
            membership, told = self._membership, self._failed == self._snapshot.generation
            recovery = membership.recovery
            if not retryable or self.lost() is not None:
                recovery = Recovery.NONE
            elif not placement and not told:
                recovery = membership.charge(counted=not lost)
            if recovery is Recovery.IN_PLACE or placement:
                recovery = Recovery.KEPT
            if not told:
                self.event("failure", {"generation": self._snapshot.generation, "ranks": ranks, "error": text,
                                       "recovery": str(recovery), "restart": recovery is not Recovery.NONE,
                                       "step": self._snapshot.progress.get("step", 0)})
            return recovery

        recovery = self._decide(judge)
        self.say("restarting" if recovery is not Recovery.NONE else "failed")
        return str(recovery)

    def end(self) -> None:
        """Write out what is collected and stop; the driver calls it last."""
        self._ended.set()
        if self._renewal is not None:
            self._renewal.close()
        if self._channel is not None:
            self._channel.stop()
        self._writer.end()
        self._log.flush()
        if self._agents is not None:
            self._agents.end(over=self._membership.phase is Phase.OVER)

    def _decide(self, function: Callable[[], T]) -> T:
        self._up.wait()
        return function() if self._channel is None else self._channel.call(function)

    # -- membership's outbox ---------------------------------------------------------------------------
    def send(self, worker: str, message: dict[str, Any]) -> None:
        if message["do"] == "join":
            message = {**message, "store": self._rendezvous, "memory": self._placement(),
                       "past": asdict(self.past())}
        if self._channel is not None:
            self._channel.send(worker, message)

    def fence(self, worker: str) -> None:
        self._cut.add(worker)
        self._note_loss(worker)
        cut = self._membership.workers.get(worker)
        if self._agents is not None and cut is not None and not any(
                other.node == cut.node for other in self._membership.workers.values() if other is not cut):
            self._agents.lost(cut.node, for_good=False)  # the whole node may stand still: asked again, it is found
        if self._channel is not None:
            self._channel.cut(worker)

    def event(self, kind: str, detail: dict[str, Any], at: float | None = None) -> None:
        """Append one event, at `at` (monotonic seconds) or now."""
        unix = time.time() if at is None else time.time() - (time.monotonic() - at)
        if kind == "worker_left_out":
            detail = {**detail, "until": unix + detail["seconds"]}
        self._record(kind, detail, unix)
        if kind == "failure":
            self._failed = int(detail["generation"])

    def formed(self, generation: int, size: int) -> None:
        state = "starting" if self._snapshot.generation < 0 else "restarting"
        self._pace = Pace()
        self._snapshot = replace(self._snapshot, generation=generation, size=size, state=state)

    def _record(self, kind: str, detail: dict[str, Any], unix: float) -> None:
        record = {"time": unix, "kind": kind, "detail": detail}
        self._log.append(record)
        if kind == "failure":
            self._past = replace(self._past, failures=self._past.failures + 1)
        if kind in NEWSWORTHY and detail.get("action") != "ignore":
            self._news.append(record)

    # -- what workers say ------------------------------------------------------------------------------
    def opened(self, name: str, hello: dict[str, Any]) -> None:
        self._known.add(name)
        node = str(hello["node"])
        if self._agents is None or self._agents.has(node):
            self._hello(name, hello)
        else:
            self._agents.want([node])
            self._waiting[name] = (hello, time.monotonic())

    def _hello(self, name: str, hello: Message) -> None:
        self._membership.hello(name, str(hello["node"]), time.monotonic(), spot=bool(hello.get("spot")),
                               device=str(hello.get("device", "")))

    def received(self, name: str, message: dict[str, Any]) -> None:
        now, membership = time.monotonic(), self._membership
        match message["say"]:
            case "beat":
                membership.beat(name, message["generation"], message["step"], now,
                                work=float(message.get("work", 0.0)), aborts=int(message.get("aborts", -1)))
            case "step":
                self._step(message["generation"], message["progress"])
                membership.beat(name, message["generation"], int(message["progress"]["step"]), now)
            case "event":
                detail = self._slow(message["detail"]) if message["kind"] == "slow_worker" else message["detail"]
                self._record(message["kind"], detail, float(message["time"]))
                if message["kind"] == "memory_tier_lost" and membership.phase is Phase.RUNNING:
                    self._agent_lost(name)
            case "leaving":
                membership.leaving(name)
            case "left":
                membership.left(name, message["generation"], ExitReason(message["how"]), str(message["text"]), now,
                                kind=str(message.get("kind", "")), accused=message.get("accused", ()))
            case "probed":
                membership.probed(name, str(message["problem"]), now)

    def _slow(self, detail: dict[str, Any]) -> dict[str, Any]:
        """What a worker's slowness leads to; its event with the node, the factor and the action."""
        found, generation = self._membership.beside(int(detail["slow_rank"])), self._membership.generation
        if found is None or generation is None:
            return detail
        worker, others = found
        ratio = 1 + float(detail["over"])
        verdict = judge(self._elastic.slow_worker, ratio, size=len(generation.members), others=others,
                        sizes=self._membership.sizes)
        if verdict.leave:
            self._membership.avoid(worker.node)
        return {**detail, "node": worker.node, "ratio": round(ratio, 3), "reason": verdict.reason,
                "action": "replace" if verdict.leave else "report"}

    def returned(self, name: str, seconds: float) -> None:
        self._membership.beat(name, -1, 0, time.monotonic())
        worker = self._membership.workers.get(name)
        self._record("worker_reconnected", {"worker": name, "node": worker.node if worker else "",
                                            "seconds": round(seconds, 3)}, time.time())

    def closed(self, name: str) -> None:
        self._waiting.pop(name, None)
        self._note_loss(name)
        self._membership.lost(name, "its process has ended, or is cut off", time.monotonic())

    def _note_loss(self, name: str) -> None:
        worker = self._membership.workers.get(name)
        if worker is not None and self._membership.phase is not Phase.OVER:
            self._losses.add(worker.node)

    def tick(self) -> None:
        now = time.monotonic()
        for name, (hello, since) in list(self._waiting.items()):
            assert self._agents is not None
            if self._agents.has(str(hello["node"])) or now - since > AGENT_SECONDS:
                del self._waiting[name]
                self._hello(name, hello)
        self._membership.tick(now)

    def _placement(self) -> dict[str, Any] | None:
        """Where the generation's memory tier is."""
        generation = self._membership.generation
        if self._agents is None or generation is None:
            return None
        return self._agents.placement([self._membership.workers[name].node for name in generation.members])

    def _agent_lost(self, name: str) -> None:
        """The agent beside a worker is gone: the next generation gets a new one."""
        worker = self._membership.workers.get(name)
        if self._agents is not None and worker is not None:
            self._agents.lost(worker.node, for_good=False)

    def _step(self, generation: int, progress: dict[str, Any]) -> None:
        if generation == self._snapshot.generation:
            self._snapshot = replace(self._snapshot, progress=progress, state="running")
            self._membership.remaining_seconds = self._pace.remaining(int(progress["step"]), int(progress["steps"]))

    # -- threads ---------------------------------------------------------------------------------------
    def _start(self, host: str) -> None:
        try:
            channel = Server(host, self._token, self)
            channel.start()
            if self._several:  # its import takes seconds, those in which the workers start
                from tidewheel.elastic.process_group import serve_store

                self._store = serve_store(host)
                self._rendezvous = (host, self._store.port)
            self._channel = channel
        except Exception as error:  # told by `place`
            self._problem = f"{type(error).__name__}: {error}"
        self._up.set()

    def _watch(self) -> None:
        from tidewheel.elastic import nodes

        known: dict[str, Node] | None = None

        def look() -> None:
            nonlocal known
            now = {node.node_id: node for node in nodes.alive(self._elastic.placement.selector)}
            if self._agents is not None:
                domains = {node_id: failure_domain(node.labels) for node_id, node in now.items()}
                self._agents.located({node_id: domain for node_id, domain in domains.items() if domain})
            self._compare(known if known is not None else now, now)
            known = now

        while not self._ended.wait(WATCH_SECONDS):
            self._supervisor.call("node watch", look)  # the GCS may be away for a moment: go on watching
            self._supervisor.call("log", self._log.flush_due)  # the last event of a burst has none behind it

    def _compare(self, known: dict[str, Node], now: dict[str, Node]) -> None:
        for node_id in known.keys() - now.keys():
            self.event("node_lost", {"node": node_id, "host": known[node_id].host})
        for node_id in now.keys() - known.keys():
            self.event("node_joined", {"node": node_id, "host": now[node_id].host,
                                       "cpus": now[node_id].resources.get("CPU", 0.0)})
        for node_id in now.keys() & known.keys():
            if now[node_id].draining and not known[node_id].draining:
                self.event("node_draining", {"node": node_id, "host": now[node_id].host})
        if self._up.is_set():
            self._decide(lambda: self._tell_nodes(known, now))

    def _tell_nodes(self, known: dict[str, Node], now: dict[str, Node]) -> None:
        self._membership.drain(node_id for node_id, node in now.items() if node.draining)
        gone = known.keys() - now.keys()
        if self._agents is not None:
            for node in gone:
                self._agents.lost(node, for_good=True)
        for worker in list(self._membership.workers.values()):
            if worker.node in gone:
                self.fence(worker.name)
                self._membership.lost(worker.name, f"node {known[worker.node].host} is gone", time.monotonic())


class Pace:
    """Steps a second of a generation, its first step left out."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def remaining(self, step: int, steps: int) -> float:
        """Seconds until `steps`, `step` being done now."""
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        done = step - self._first[0]
        return (steps - step) * (now - self._first[1]) / done if done > 0 else math.inf


def actor_name(run_uri: str) -> str:
    """Name of a run's coordinator: two drivers cannot train the same run at once on one cluster."""
    return f"run-{hashlib.sha256(run_uri.encode()).hexdigest()[:16]}"
