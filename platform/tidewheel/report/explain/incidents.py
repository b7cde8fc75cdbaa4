"""The incidents of a run in order: what happened, on which nodes, why, and what it cost."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidewheel.report.disturbances import Disturbance, grouped
from tidewheel.report.events import SAME_FAILURE_SECONDS, Event
from tidewheel.report.explain.causes import ALONE, CAUSES, ECHOES, Cause, of_error, of_guard

JOINED_SECONDS = 600.0
"""Incidents of one cause and place that cost nothing are one incident if they follow each other within this time."""
FOUND_SECONDS = 120.0
"""A hang or corruption is recorded before the failure that it leads to, at most this long."""
UPLOADS = frozenset({"upload_failed", "save_failed"})
"""Events of uploads, which a lost worker or the next driver may break off."""
ECHO = re.compile(r"the run was taken over by|gloo|nccl|process group|communicator|the generation has ended",
                  re.IGNORECASE)
"""What an upload fails with then. A store's connection may break too, so "connection reset" alone is not enough."""
SHOWN_CHARACTERS = 12
"""Characters of a node's id that are shown for a node without a known host."""


@dataclass
class Incident:
    """One thing that happened, or one that repeated."""

    cause: Cause
    time: float
    step: int
    text: str = ""
    """The error or reason as it was recorded."""
    nodes: tuple[str, ...] = ()
    """Hosts of the nodes, or the beginning of their ids."""
    ranks: tuple[int, ...] = ()
    times: int = 1
    workers: tuple[int, int] = (0, 0)
    """Number of workers before and after; (0, 0): it did not change them."""
    pause: float = 0.0
    """Seconds without a step."""
    redone: int = 0
    """Steps done again."""
    cost: dict[str, float] = field(default_factory=dict)
    """Worker seconds by category."""
    final: bool = False
    """It ended the run, or this start of it."""

    @property
    def seconds(self) -> float:
        """Worker seconds lost."""
        return sum(self.cost.values())


class Names:
    """Knows nodes by their ids: hosts from events, and the nodes of ranks from the ledger.

    Args:
        events: of the run.
        ledger: its time ledger.
    """

    def __init__(self, events: Iterable[Event], ledger: Iterable[dict[str, Any]]) -> None:
        self._hosts: dict[str, str] = {}
        for event in events:
            ids, hosts = nodes_of(event), event.detail.get("hosts", [event.detail.get("host", "")])
            self._hosts.update({node: str(host) for node, host in zip(ids, hosts, strict=False) if host})
        self._short = {node[:SHOWN_CHARACTERS]: host for node, host in self._hosts.items()}
        self._of_rank = {(int(part["generation"]), int(part["rank"])): str(part.get("node", "")) for part in ledger
                         if part.get("node")}

    def of(self, node: str) -> str:
        """Return the host of a node, or the beginning of its id."""
        return self._hosts.get(node) or self._short.get(node[:SHOWN_CHARACTERS]) or node[:SHOWN_CHARACTERS]

    def of_rank(self, generation: Any, rank: Any) -> str:
        """Return the host of a rank's node; "" if the ledger does not know it."""
        node = self._of_rank.get((generation, rank), "")
        return self.of(node) if node else ""


def nodes_of(event: Event) -> list[str]:
    """Return the ids of the nodes that an event names."""
    nodes = event.detail.get("nodes", [event.detail.get("node") or event.detail.get("host", "")])
    return [str(node) for node in nodes if node] if isinstance(nodes, list) else []


def incidents(events: Sequence[Event], metrics: Sequence[dict[str, Any]],
              ledger: Sequence[dict[str, Any]]) -> list[Incident]:
    """Return all incidents in order.

    Args:
        events: of the run, with their costs.
        metrics: lines of metrics.jsonl.
        ledger: the time ledger with its gaps filled.
    """
    teller = _Teller(events, Names(events, ledger))
    result: list[Incident] = []
    for disturbance in grouped(events, metrics):
        told = teller.of(disturbance)
        if not told and result:  # the end of something that is told already, such as the machine of a lost worker
            _add(result[-1].cost, disturbance.cost)
        result += told
    result += teller.alone(result)
    return _joined(sorted(result, key=lambda incident: incident.time))


class _Teller:
    """Turns events into incidents."""

    def __init__(self, events: Sequence[Event], names: Names) -> None:
        self._events, self._names = events, names
        self._lost = [event for event in events if event.kind == "node_lost"]
        self._drained = {node for event in events if event.kind == "node_draining" for node in nodes_of(event)}
        self._found = [event for event in events if event.kind in ("hang", "corruption")]
        begun = [event for event in events if event.kind in ("start", "resume")]
        self._begun = [event.time for event in begun]
        self._generations = [event.detail.get("generation") for event in begun]
        self._told = set[int]()  # identities of events that are part of an incident

    def of(self, disturbance: Disturbance) -> list[Incident]:
        """Return the incidents of a disturbance. The one that changed the workers has its pause and repeated steps."""
        told: list[Incident] = []
        early: dict[str, float] = {}
        main: Incident | None = None  # what changed the workers
        for event in disturbance.events:
            incident = self._incident(event, told, disturbance)
            if incident is not None:
                told.append(incident)
            if told and (event.kind == "failure" or (event.kind in ("resize", "rollback") and main is None)):
                main = incident or next(item for item in reversed(told) if item.cause.planned)
            _add(told[-1].cost if told else early, event.cost)
            self._told.add(id(event))
        begin = disturbance.begin
        if not told and begin.kind in ("start", "resume"):  # a run without a cluster records nothing before it
            told.append(Incident(CAUSES[self._end_before(begin)], begin.time, begin.step))
        if not told:
            return []
        _add(told[0].cost, early)
        main = main or next((incident for incident in told if not incident.cause.planned), told[0])
        main.pause, main.redone, main.workers = disturbance.pause, disturbance.redone, disturbance.workers
        return told

    def _incident(self, event: Event, told: list[Incident], disturbance: Disturbance) -> Incident | None:
        """Return the incident that an event of a disturbance begins; None if it belongs to an earlier one."""
        if event.kind == "failure":
            return self._failure(event)
        if event.kind == "node_lost":
            nodes = nodes_of(event)
            if id(event) in self._told or self._drained.issuperset(nodes):
                return None
            return Incident(CAUSES["node_lost"], event.time, event.step, nodes=self._named(nodes))
        if event.kind == "rollback":
            return Incident(CAUSES[of_guard(str(event.detail.get("reason", "")))], event.time, event.step,
                            f"{event.detail.get('reason', '')}: back to step {event.detail.get('back_to')}")
        if event.kind == "driver_start":
            key = self._end_before(event)
            return Incident(CAUSES[key], event.time, event.step)
        if event.kind in ("node_draining", "node_joined", "resize"):
            reason = {"node_draining": "drain", "node_joined": "join"}.get(event.kind, str(event.detail.get("reason")))
            key = reason if reason in ("drain", "join") else "resize"
            same = [incident for incident in told if incident.cause.key == key]
            named = self._named(nodes_of(event))
            if same:
                same[-1].nodes = tuple(dict.fromkeys((*same[-1].nodes, *named)))
                return None
            if event.kind == "node_joined" and "resize" not in disturbance.kinds:
                return None if told else Incident(CAUSES["join"], event.time, event.step, nodes=named)
            return Incident(CAUSES[key], event.time, event.step, nodes=named)
        return None

    def _failure(self, event: Event) -> Incident:
        detail = event.detail
        text = str(detail.get("error", ""))
        ranks = tuple(rank for rank in detail.get("ranks", ()) if isinstance(rank, int))
        nodes = self._named(nodes_of(event)) or self._named_ranks(detail.get("generation"), ranks)
        key = of_error(text)
        final = detail.get("restart") is False
        if key in ECHOES:
            for lost in self._lost:  # a node and the failure of its workers are noticed separately
                near = abs(lost.time - event.time) < SAME_FAILURE_SECONDS
                if near and set(self._named(nodes_of(lost))) & set(nodes):
                    key = "node_lost"
                    self._told.add(id(lost))
        for found in self._found:
            if found.kind == key and 0 <= event.time - found.time < FOUND_SECONDS:
                self._told.add(id(found))
                nodes = self._named(nodes_of(found)) or nodes
                ranks = tuple(found.detail.get("ranks", ())) or ranks
                text = str(found.detail.get("what" if key == "corruption" else "found", text))
        if key == "error" and final:
            key = "failed_for_good"
        return Incident(CAUSES[key], event.time, event.step, text, nodes, ranks, final=final)

    def _end_before(self, start: Event) -> str:
        """Return the cause for which a driver was started: how the one before it ended."""
        before = [event for event in self._events if event.time < start.time]
        trained = any(event.kind in ("start", "resume", "driver_start") for event in before)
        ends = [event for event in before if event.kind in ("stopped", "taken_over", "finish", "failure", "resume",
                                                            "start", "driver_start")]
        if not trained:
            return "start"
        last = ends[-1]
        if last.kind in ("stopped", "taken_over"):
            return {"stopped": "user_stop"}.get(last.kind, last.kind)
        if last.kind == "finish" or (last.kind == "failure" and last.detail.get("restart") is False):
            return "start"
        after = [event for event in self._events if event.time >= start.time]
        own = itertools.takewhile(lambda event: event is start or event.kind != "driver_start", after)
        return "coordinator_lost" if any(event.kind == "coordinator_lost" for event in own) else "driver_lost"

    def alone(self, others: Sequence[Incident]) -> list[Incident]:
        """Return the incidents of events that stand for themselves.

        Args:
            others: the incidents that are known already.
        """
        rolled_back = {incident.step for incident in others if "back to step" in incident.text}
        result = []
        for event in self._events:
            if id(event) in self._told:
                continue
            detail = event.detail
            ranks = tuple(rank for rank in (detail.get("slow_rank"),) if isinstance(rank, int))
            if event.kind == "guard" and event.step not in rolled_back:
                reason = str(detail.get("reason", ""))
                result.append(Incident(CAUSES[of_guard(reason)], event.time, event.step,
                                       f"{reason}: {detail.get('action', '')}"))
            elif event.kind == "worker_left_out" and of_error(str(detail.get("reason", ""))) == "probe_failed":
                result.append(Incident(CAUSES["probe_failed"], event.time, event.step, str(detail["reason"]),
                                       self._named(nodes_of(event))))
            elif event.kind == "corruption":
                result.append(Incident(CAUSES["corruption"], event.time, event.step, str(detail.get("what", "")),
                                       self._named(nodes_of(event)), tuple(detail.get("ranks", ()))))
            elif event.kind in UPLOADS and _is_echo(str(detail.get("reason", ""))):
                continue
            elif event.kind in ALONE:
                key, fields = ALONE[event.kind]
                text = ": ".join(str(detail[name]) for name in fields if detail.get(name) not in (None, ""))
                nodes = self._named(nodes_of(event)) or self._named_ranks(self._at(event), ranks)
                result.append(Incident(CAUSES[key], event.time, event.step, text, nodes, ranks))
        return result

    def _at(self, event: Event) -> Any:
        """Return the generation that trained when an event was recorded."""
        count = bisect_right(self._begun, event.time)
        return self._generations[count - 1] if count else -1

    def _named(self, nodes: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._names.of(node) for node in nodes))

    def _named_ranks(self, generation: Any, ranks: Iterable[int]) -> tuple[str, ...]:
        hosts = [self._names.of_rank(generation, rank) for rank in ranks]
        return tuple(dict.fromkeys(host for host in hosts if host))


def _is_echo(reason: str) -> bool:
    """Return whether an upload failed by the loss of a worker or by the next driver, of which the run tells anyway."""
    return ECHO.search(reason) is not None


def _add(cost: dict[str, float], more: dict[str, float]) -> None:
    for name, seconds in more.items():
        cost[name] = cost.get(name, 0.0) + seconds


def _joined(result: Sequence[Incident]) -> list[Incident]:
    """Merge incidents that repeat without a cost, such as failed saves while storage is unavailable."""
    joined: list[Incident] = []
    newest: dict[tuple[str, tuple[str, ...]], tuple[Incident, float]] = {}
    for incident in result:
        place = (incident.cause.key, incident.nodes)
        before, until = newest.get(place, (None, 0.0))
        free = not incident.seconds and not incident.pause and not incident.final and not any(incident.workers)
        if before is not None and free and not any(before.workers) and incident.time - until < JOINED_SECONDS:
            before.times += 1
        else:
            joined.append(incident)
            before = incident
        newest[place] = (before, incident.time)
    return joined
