"""`tidewheel logs`: the logs of a run."""

from __future__ import annotations

import json
import time
from typing import Annotated, Literal

from cyclopts import Parameter

from tidewheel.console import console
from tidewheel.errors import ConfigError
from tidewheel.printable import printable_lines

POLL_SECONDS = 1.0
"""Seconds between two checks for new lines with --follow."""


def logs(
    run: Annotated[str, Parameter(help="URI of a run.")],
    *,
    rank: Annotated[int | None, Parameter(help="Lines of this rank only, without those of other processes.")] = None,
    since: Annotated[str, Parameter(help="Lines from this time on: 10m (ten minutes ago; s, h, d), 14:30, "
                                         "2026-11-23T14:30, with a Z for UTC.")] = "",
    level: Annotated[Literal["debug", "info", "warning", "error", "critical"],
                     Parameter(help="Lines of this level and above.")] = "debug",
    generation: Annotated[int | None, Parameter(help="Lines of this generation of workers only.")] = None,
    follow: Annotated[bool, Parameter(negative="", help="Show new lines until the run is over, or Ctrl-C.")] = (
        False),
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="Print JSON lines.")] = False,
) -> int:
    """Show the logs of a run's workers, coordinator, memory agents and evaluator, merged by time.

    The logs are in the run's folder, so this works during the run and after all of its machines are gone.
    """
    from tidewheel.storage import store
    from tidewheel.train.logs.read import LineFilter, RunLogs, parse_since

    run_store = store(run)
    selection = LineFilter(rank, generation, parse_since(since) if since else 0.0, level)
    logs = RunLogs(run_store)
    shown = 0
    over = False
    while not over:
        over = not follow or run_store.exists("result.json")  # checked first, so that the last lines are not missed
        for line in logs.new(selection):
            print(json.dumps(line.as_json()) if as_json else printable_lines(line.as_text()), flush=follow)
            shown += 1
        if not over:
            time.sleep(POLL_SECONDS)
    if not shown:
        if logs.is_empty:
            _explain(run, run_store.exists("run.json"))
        console.print(f"no line matches; there are lines of ranks {_listed(logs.ranks)} and generations "
                      f"{_listed(logs.generations)}", markup=False)
    return 0


def _explain(run: str, is_run: bool) -> None:
    """Raise the reason why there is no log.

    Raises:
        ConfigError: no worker has logged, or the URI is not a run.
    """
    if is_run:
        raise ConfigError("no worker of this run has logged anything", where=run,
                          fix="a worker's log exists from its first line on; a run of an older version has none. "
                              "Its events are in events.jsonl")
    raise ConfigError("this is not a run: it has neither run.json nor logs/", where=run,
                      fix="give the folder RUN.URI/RUN.ID that `tidewheel train` wrote to, such as runs/demo")


def _listed(numbers: set[int]) -> str:
    """Return numbers as text, with ranges such as 0-7."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
