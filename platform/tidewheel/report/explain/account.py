"""The account of a run: its health, its incidents, and their sums by cause and by node."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tidewheel import jsonlog, ownership, storage
from tidewheel.checkpoint.verify import newest_committed
from tidewheel.cluster import node_history
from tidewheel.commit_log import CommitLog
from tidewheel.errors import StorageError
from tidewheel.report.events import Event, read_events
from tidewheel.report.explain.causes import CAUSES, Cause
from tidewheel.report.explain.health import Health, Owner, health
from tidewheel.report.explain.incidents import Incident, incidents
from tidewheel.storage import Store
from tidewheel.train.node_checks_config import NodeChecksConfig
from tidewheel.train.time_ledger import COUNTED, summarise

logger = logging.getLogger(__name__)


@dataclass
class CauseSum:
    """All incidents of one cause."""

    cause: Cause
    times: int = 0
    seconds: float = 0.0
    """Worker seconds lost."""
    pause: float = 0.0
    """Seconds without a step."""
    redone: int = 0
    """Steps done again."""
    nodes: Counter[str] = field(default_factory=Counter)
    """Incidents by node."""
    ranks: Counter[int] = field(default_factory=Counter)
    texts: Counter[str] = field(default_factory=Counter)
    """Errors and reasons, by how often they were recorded."""


@dataclass(frozen=True)
class NodeHistoryLine:
    """A node's failures in all runs of the folder."""

    host: str
    failures: int
    runs: int
    newest: float
    """Unix seconds."""
    text: str
    """Error of the newest one."""
    excluded_until: float
    """Unix seconds until which new drivers do without the node; -inf: they may use it."""


@dataclass(frozen=True)
class Account:
    """All that `tidewheel explain` says about a run."""

    run: str
    """Its id."""
    uri: str
    health: Health
    began: float
    """Unix seconds of the first event or step; 0 without any."""
    ended: float
    """Unix seconds of the last one."""
    step: int
    steps: int
    """Planned steps; 0 if unknown."""
    goodput: float | None
    """Productive share of the workers' time; None without a ledger."""
    worker_seconds: float
    node_seconds: float
    """Time of the nodes, whatever the number of their workers."""
    incidents: tuple[Incident, ...]
    causes: tuple[CauseSum, ...]
    """Failures by what they cost, then planned changes."""
    repeaters: dict[str, Counter[str]]
    """Nodes on which more than one failure happened, with the number of each cause."""
    history: tuple[NodeHistoryLine, ...] = ()
    """Nodes that failed more than once of late, in all runs of the folder."""

    @property
    def failures(self) -> int:
        """Number of incidents that nobody planned."""
        return sum(item.times for item in self.causes if not item.cause.planned)


def account(uri: str, *, now: float | None = None) -> Account:
    """Read a run and return its account.

    Args:
        uri: the run's folder.
        now: Unix seconds; default: the present.

    Raises:
        StorageError: there is no run.json.
    """
    run_store = storage.store(uri)
    try:
        run = run_store.read_json("run.json")
    except FileNotFoundError:
        raise StorageError("no run.json: this is not the folder of a run", where=uri,
                           fix="give runs/<id>, the folder that `tidewheel train` names") from None
    metrics = sorted(jsonlog.read(run_store, "metrics.jsonl"), key=lambda line: line.get("time", 0))
    records = [record for record in jsonlog.read(run_store, jsonlog.EVENTS)
               if {"time", "kind", "detail"} <= record.keys()]
    parts = [part for part in jsonlog.read(run_store, "ledger.jsonl")
             if {"rank", "generation", "category", "start", "end"} <= part.keys()]
    ledger = [dict(part) for part in summarise(parts, records).records]
    events = read_events(records, metrics, ledger)
    result = run_store.read_json("result.json") if run_store.exists("result.json") else {}
    now = time.time() if now is None else now
    state = present_health(run_store, result, events, metrics, now)
    return of(uri, run, state, events, metrics, ledger, history_of(uri, run, now))


def history_of(uri: str, run: dict[str, Any], now: float) -> tuple[NodeHistoryLine, ...]:
    """Return the nodes that failed more than once within the run's `node_checks.within_seconds`.

    A run may be readable while the folder of runs is not; then there are none.

    Args:
        uri: the run's folder.
        run: run.json.
        now: Unix seconds.
    """
    try:
        checks = NodeChecksConfig.model_validate(run.get("config", {}).get("elastic", {}).get("node_checks", {}))
    except ValueError as error:  # of another release: what a run records outlives the settings
        logger.warning("the run's node_checks cannot be read, so the defaults count: %s", error)
        checks = NodeChecksConfig()
    folder = storage.store(checks.history or uri.rstrip("/").rpartition("/")[0] or ".")
    since = now - checks.within_seconds
    try:
        failures = node_history.read(folder, since)
    except StorageError as error:
        logger.warning("the history of the nodes cannot be read: %s", error)
        return ()
    records = node_history.by_host(failures, since)
    lines = []
    for host, record in records.items():
        if len(record.failures) > 1:
            newest = record.failures[-1]
            until = record.excluded_until(checks.failures, checks.exclude_seconds)
            lines.append(NodeHistoryLine(host, len(record.failures), len({failure.run for failure in record.failures}),
                                         newest.time, newest.text, until if until > now else -math.inf))
    return tuple(sorted(lines, key=lambda line: (-line.failures, line.host)))


def present_health(run_store: Store, result: dict[str, Any], events: Sequence[Event],
                   metrics: Sequence[dict[str, Any]], now: float) -> Health:
    """Return the health of a run in its folder; see `health.health`.

    Args:
        run_store: the run's folder.
        result: result.json; {} while the run is not over.
        events: of the run, in order.
        metrics: lines of metrics.jsonl, in order.
        now: Unix seconds.
    """
    checkpoints = run_store.child(ownership.CHECKPOINTS)
    return health(result, events, metrics, _owner(run_store), newest_committed(checkpoints)[1], now)


def of(uri: str, run: dict[str, Any], state: Health, events: Sequence[Event], metrics: Sequence[dict[str, Any]],
       ledger: Sequence[dict[str, Any]], history: tuple[NodeHistoryLine, ...] = ()) -> Account:
    """Return the account of a run that has been read.

    Args:
        uri: the run's folder.
        run: run.json.
        state: its health.
        events: of the run, with their costs.
        metrics: lines of metrics.jsonl, in order.
        ledger: the time ledger with its gaps filled.
        history: nodes that failed more than once, in all runs.
    """
    happened = incidents(events, metrics, ledger)
    ends = (*metrics[:1], *metrics[-1:])
    times = [event.time for event in events] + [float(line["time"]) for line in ends if "time" in line]
    worker_seconds = sum(part["end"] - part["start"] for part in ledger)
    productive = sum(part["end"] - part["start"] for part in ledger if part["category"] in COUNTED)
    return Account(
        run=str(run.get("id") or uri.rstrip("/").rpartition("/")[2]), uri=uri, health=state,
        began=min(times, default=0.0), ended=max(times, default=0.0),
        step=max((int(line["step"]) for line in metrics if "loss" in line), default=0),
        steps=int(run.get("config", {}).get("steps") or 0),
        goodput=productive / worker_seconds if worker_seconds else None, worker_seconds=worker_seconds,
        node_seconds=_node_seconds(ledger), incidents=tuple(happened), causes=_by_cause(happened),
        repeaters=_repeaters(happened), history=history)


def _owner(run_store: Store) -> Owner | None:
    log = CommitLog(run_store.child(ownership.CHECKPOINTS))
    head = log.head()
    if head is None:
        return None
    return Owner(head, log.last_beat(head.epoch)[1], ownership.timing(run_store).lease)


def _by_cause(happened: Sequence[Incident]) -> tuple[CauseSum, ...]:
    sums: dict[str, CauseSum] = {}
    for incident in happened:
        item = sums.setdefault(incident.cause.key, CauseSum(incident.cause))
        item.times += incident.times
        item.seconds += incident.seconds
        item.pause += incident.pause
        item.redone += incident.redone
        item.nodes.update(dict.fromkeys(incident.nodes, incident.times))
        item.ranks.update(dict.fromkeys(incident.ranks, incident.times))
        if incident.text:
            item.texts[incident.text.strip()] += incident.times
    order = list(CAUSES)
    return tuple(sorted(sums.values(), key=lambda item: (item.cause.planned, -item.seconds,
                                                         order.index(item.cause.key))))


def _repeaters(happened: Sequence[Incident]) -> dict[str, Counter[str]]:
    by_node: dict[str, Counter[str]] = {}
    for incident in happened:
        for node in incident.nodes if incident.cause.blames_node else ():
            by_node.setdefault(node, Counter())[incident.cause.title] += incident.times
    repeated = [(node, counts) for node, counts in by_node.items() if counts.total() > 1]
    return dict(sorted(repeated, key=lambda item: (-item[1].total(), item[0])))


def _node_seconds(ledger: Sequence[dict[str, Any]]) -> float:
    """Return the time from the first to the last record of each node in each generation, added up."""
    spans: dict[tuple[int, str], tuple[float, float]] = {}
    for part in ledger:
        key = (int(part["generation"]), str(part.get("node", "")))
        first, last = spans.get(key, (part["start"], part["end"]))
        spans[key] = (min(first, part["start"]), max(last, part["end"]))
    return sum(last - first for first, last in spans.values())
