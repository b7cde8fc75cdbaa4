"""The section about the runs that a run branches from."""

from __future__ import annotations

from typing import Any

from tidewheel.report.page import Html, shorten, table, tag

NOTE = "The run began with the whole state that its parent had at this step, and its data go on from there."


def section(run: dict[str, Any]) -> list[Html]:
    """Return a table with a row for each ancestor, the parent first; [] for a run that is no branch.

    Args:
        run: content of run.json.
    """
    rows = []
    parent = run.get("branch")
    while parent:
        where = str(parent["run"])
        rows.append((str(parent["id"]), f"{int(parent['step']):,}", tag("code", str(parent["recipe_hash"])[:12]),
                     tag("span", shorten(where, 80), title=where)))
        parent = parent.get("parent")
    return [table(("parent", "branched after step", "recipe", "run"), rows, numeric=(1,))] if rows else []
