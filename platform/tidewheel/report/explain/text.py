"""The account of a run as plain text for a terminal, and as JSON."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Iterator
from typing import Any

from tidewheel.printable import printable
from tidewheel.report.events import workers
from tidewheel.report.explain.account import Account, CauseSum, NodeHistoryLine
from tidewheel.report.explain.incidents import Incident
from tidewheel.report.page import seconds as duration
from tidewheel.report.page import shorten

WIDTH = 110
NEWEST = 40
"""Incidents that are listed without `--all`."""
TEXT_CHARACTERS = 160
NODES = 6
"""Nodes named for each cause."""


def lines(account: Account, *, every: bool = False) -> Iterator[str]:
    """Yield the account line by line, without control characters.

    Args:
        account: of the run.
        every: list every incident, not only the newest ones.
    """
    yield from map(printable, _lines(account, every))


def _lines(account: Account, every: bool) -> Iterator[str]:
    state = account.health
    yield f"run {account.run}: {state.state}, {'healthy' if state.healthy else 'needs attention'}"
    yield f"  {state.text}"
    for problem in state.problems:
        yield f"  ! {problem}"
    goodput = f"; goodput {100 * account.goodput:.1f} % of {duration(account.worker_seconds)} of worker time" if (
        account.goodput is not None) else ""
    planned = f" of {account.steps:,}" if account.steps else ""
    changes = sum(item.times for item in account.causes if item.cause.planned and item.cause.key != "start")
    yield (f"  step {account.step:,}{planned} after {duration(account.ended - account.began)}; {account.failures} "
           f"failure{'s' * (account.failures != 1)}, {changes} planned change{'s' * (changes != 1)}{goodput}")
    yield ""
    if not account.failures:
        yield "Nothing has failed."
        yield ""
    yield from _causes(account)
    if account.repeaters:
        yield "Nodes that failed more than once"
        for node, counts in account.repeaters.items():
            yield f"  {node}: " + ", ".join(f"{name} x {count}" for name, count in counts.most_common())
        yield "  test them (`tidewheel doctor --address auto`), and leave them out if it happens again"
        yield ""
    if account.history:
        yield "Nodes that failed more than once of late, in all runs of this folder (UTC)"
        yield from (f"  {line}" for line in map(history_line, account.history))
        yield ""
    yield from _timeline(account, every)


def _causes(account: Account) -> Iterator[str]:
    for item in account.causes:
        if item.cause.key == "start":
            continue
        if item.cause.planned and item.times:
            yield f"{item.cause.title}: {item.times} x{_cost(item)}"
            continue
        yield f"{item.cause.title.upper()}: {item.times} x{_cost(item)}"
        if item.nodes:
            named = [f"{node}{f' x {count}' if count > 1 else ''}" for node, count in item.nodes.most_common(NODES)]
            rest = f" and {len(item.nodes) - NODES} more" if len(item.nodes) > NODES else ""
            yield "  on: " + ", ".join(named) + rest
        for text, count in item.texts.most_common(3):
            yield f"  said: {shorten(' '.join(text.split()), TEXT_CHARACTERS)}" + (f"  ({count} x)" * (count > 1))
        yield from textwrap.wrap(f"do: {advice(item, account.uri)}", WIDTH, initial_indent="  ",
                                 subsequent_indent="      ")
    if any(item.cause.key != "start" for item in account.causes):
        yield ""


def advice(item: CauseSum, uri: str) -> str:
    """Return what to do, with the run's URI and, if there is only one, the rank.

    Args:
        item: incidents of one cause.
        uri: the run's folder.
    """
    text = item.cause.advice.replace("tidewheel logs RUN", f"tidewheel logs {uri}")
    return text.replace("--rank N", f"--rank {next(iter(item.ranks))}") if len(item.ranks) == 1 else text


def _cost(item: CauseSum) -> str:
    parts = []
    if item.pause >= 0.05:
        parts.append(f"{duration(item.pause)} without a step")
    if item.redone:
        parts.append(f"{item.redone} steps done again")
    if item.seconds >= 0.05:
        parts.append(f"{duration(item.seconds)} of worker time lost")
    return ", " + ", ".join(parts) if parts else ""


def history_line(line: NodeHistoryLine) -> str:
    """Return the history of a node in one line."""
    newest = time.strftime("%Y-%m-%d %H:%M", time.gmtime(line.newest))
    text = (f"{line.host}: {line.failures} failures in {line.runs} run{'s' * (line.runs != 1)}, the newest at {newest} "
            f"({shorten(' '.join(line.text.split()), TEXT_CHARACTERS // 2)})")
    if line.excluded_until == -math.inf:
        return text
    until = time.strftime("%Y-%m-%d %H:%M", time.gmtime(line.excluded_until))
    return f"{text}; new runs avoid it, if they can, until {until}"


def _timeline(account: Account, every: bool) -> Iterator[str]:
    shown = account.incidents if every else account.incidents[-NEWEST:]
    left_out = len(account.incidents) - len(shown)
    yield "What happened, in order (UTC)" + (f"; {left_out} earlier ones with --all" if left_out else "")
    day = ""
    for incident in shown:
        today = time.strftime("%Y-%m-%d", time.gmtime(incident.time))
        if today != day:
            yield f"  {today}"
            day = today
        yield f"  {time.strftime('%H:%M:%S', time.gmtime(incident.time))}  step {incident.step:>7,}  " + told(incident)


def told(incident: Incident) -> str:
    """Return an incident in one line, without its time."""
    parts = [incident.cause.title + (f" x {incident.times}" if incident.times > 1 else "")]
    if incident.nodes:
        parts.append("on " + ", ".join(incident.nodes[:NODES]) + (" ..." * (len(incident.nodes) > NODES)))
    if incident.ranks:
        ranks = ", ".join(map(str, incident.ranks[:NODES])) + (" ..." * (len(incident.ranks) > NODES))
        parts.append(f"(rank {ranks})")
    before, after = incident.workers
    if before != after:
        parts.append(f"{before} -> {after} workers" if before else f"with {workers(after)}")
    if incident.pause >= 0.05:
        what = "first step after" if incident.cause.key == "start" else "paused"
        parts.append(f"{what} {duration(incident.pause)}")
    if incident.redone:
        parts.append(f"{incident.redone} steps again")
    if incident.final:
        parts.append("it ended the run")
    if incident.text and incident.cause.key not in ("worker_killed", "node_lost"):
        parts.append("| " + shorten(" ".join(incident.text.split()), TEXT_CHARACTERS // 2))
    return " ".join(parts)


def as_json(account: Account) -> dict[str, Any]:
    """Return the account as JSON values."""
    return {
        "run": account.run,
        "health": {"state": str(account.health.state), "healthy": account.health.healthy,
                   "text": account.health.text, "problems": list(account.health.problems)},
        "step": account.step, "steps": account.steps, "began": account.began, "ended": account.ended,
        "goodput": account.goodput, "worker_seconds": account.worker_seconds, "failures": account.failures,
        "causes": [{
            "cause": item.cause.key, "title": item.cause.title, "planned": item.cause.planned, "times": item.times,
            "worker_seconds": round(item.seconds, 3), "pause_seconds": round(item.pause, 3), "redone": item.redone,
            "nodes": dict(item.nodes), "ranks": {str(rank): count for rank, count in item.ranks.items()},
            "texts": dict(item.texts.most_common(3)), "what_to_do": item.cause.advice} for item in account.causes],
        "failed_more_than_once": {node: dict(counts) for node, counts in account.repeaters.items()},
        "node_history": [{**vars(line), "excluded_until": None if line.excluded_until == -math.inf
                          else line.excluded_until} for line in account.history],
        "incidents": [{
            "time": incident.time, "step": incident.step, "cause": incident.cause.key, "text": incident.text,
            "nodes": list(incident.nodes), "ranks": list(incident.ranks), "times": incident.times,
            "workers": list(incident.workers), "pause_seconds": round(incident.pause, 3), "redone": incident.redone,
            "worker_seconds": {name: round(spent, 3) for name, spent in incident.cost.items()},
            "final": incident.final} for incident in account.incidents]}
