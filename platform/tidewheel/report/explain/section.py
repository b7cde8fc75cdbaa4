"""The account of a run as a section of its report."""

from __future__ import annotations

import time

from tidewheel.printable import printable
from tidewheel.report.explain.account import Account, CauseSum
from tidewheel.report.explain.text import NODES, advice, history_line, told
from tidewheel.report.page import Html, badge, details, join, seconds, shorten, table, tag

NOTE = "Failures by cause, the most expensive first. The command tidewheel explain prints the same in a terminal."
MAX_INCIDENTS = 300


def section(account: Account) -> list[Html]:
    """Return the section's blocks: health, a row for each cause, suspect nodes, and the incidents, folded.

    A healthy run in which nothing has happened has none.
    """
    state = account.health
    if state.healthy and all(item.cause.key == "start" for item in account.causes):
        return []
    blocks = [tag("p", badge(str(state.state), "good" if state.healthy else "bad"), " ", state.text)]
    blocks += [tag("p", badge("attention", "bad"), " ", problem) for problem in state.problems]
    causes = [item for item in account.causes if item.cause.key != "start"]
    if causes:
        blocks.append(table(("what", "times", "no step for", "steps again", "worker time", "where", "what to do"),
                            [_row(item, account.uri) for item in causes], numeric=(1, 2, 3, 4)))
    if account.repeaters:
        blocks.append(tag("h3", "Nodes that failed more than once"))
        blocks.append(table(("node", "failures"), [
            (node, ", ".join(f"{name} × {count}" for name, count in counts.most_common()))
            for node, counts in account.repeaters.items()]))
    if account.history:
        blocks.append(tag("h3", "Nodes that failed more than once of late, in all runs of this folder (UTC)"))
        blocks += [tag("p", printable(history_line(line))) for line in account.history]
    shown = account.incidents[-MAX_INCIDENTS:]
    if shown:
        rows = [(time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(incident.time)), f"{incident.step:,}",
                 printable(told(incident))) for incident in shown]
        blocks.append(details(f"What happened, in order ({len(account.incidents):,})",
                              table(("time (UTC)", "step", "what"), rows, numeric=(1,))))
    return blocks


def _row(item: CauseSum, uri: str) -> tuple[object, ...]:
    nodes = [tag("div", f"{printable(node)}{f' × {count}' if count > 1 else ''}", style="white-space:nowrap")
             for node, count in item.nodes.most_common(NODES)]
    text = next(iter(dict(item.texts.most_common(1))), "")
    what = join([badge(item.cause.title, "" if item.cause.planned else "bad"),
                 tag("div", shorten(printable(" ".join(text.split())), 140), class_="note") if text else None])
    return (what, f"{item.times:,}", seconds(item.pause) if item.pause >= 0.05 else "–", item.redone or "–",
            seconds(item.seconds) if item.seconds >= 0.05 else "–", join(nodes) or "–", _code(advice(item, uri)))


def _code(text: str) -> Html:
    """Return a text whose parts in backticks are commands."""
    return join(tag("code", part) if at % 2 else part for at, part in enumerate(text.split("`")))
